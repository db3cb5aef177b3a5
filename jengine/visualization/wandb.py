"""The backend of Weights & Biases."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.registry import VISBACKENDS
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.convert import Histogram, encode_png, to_plain

_WHICH = ("id", "resume", "resume_from", "fork_from")  # settings of `wandb.init` that choose a run


@VISBACKENDS.register_module()
class WandbVisBackend(BaseVisBackend):
    """Sends everything to a run of Weights & Biases; offline to files below `save_dir`, for `wandb sync` later.

    Each entry carries its `step`, which is the axis of all curves: the run's own counter only goes up, and validations
    count in epochs. A resumed run continues the run of its checkpoint and rewinds it to where it stood then
    (`resume_from` of `wandb.init`); offline the rewinding is noted in the files, for `wandb sync` to do.

    Args:
      save_dir: the directory for its files.
      init_kwargs: for `wandb.init`: `project`, `name`, `mode='offline'`, ….
      define_metric_cfg: name -> summary for `define_metric`, as `{'val/accuracy': 'max'}`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        init_kwargs: Mapping[str, Any] | None = None,
        define_metric_cfg: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._init = dict(init_kwargs or {})
        self._summaries = dict(define_metric_cfg or {})
        self._id: str | None = None  # of the run, once there is one
        self._texts: dict[str, str] = {}  # config and graph, until there is a run
        self._entries = 0  # logged by the run, the run's own counter
        self._run: Any = None

    @property
    def experiment(self) -> Any:
        """The run, begun at the first use.

        Raises:
          ImportError: wandb is not installed.
        """
        if self._run is None:
            wandb = _wandb()
            self.save_dir.mkdir(parents=True, exist_ok=True)
            self._run = self._begin(wandb)
            self._run.define_metric("*", step_metric="step")
            for name, summary in self._summaries.items():
                self._run.define_metric(name, step_metric="step", summary=summary)
            self._write_texts()
        return self._run

    def _begin(self, wandb: Any) -> Any:
        """A new run, or the one whose `id` is known as it stood after `_entries` entries."""
        if self._id is None:
            run = wandb.init(**{"dir": str(self.save_dir), **self._init})
            self._id, self._entries = run.id, run.step  # there are entries already if the settings name a run
            return run
        init = {"dir": str(self.save_dir), **{k: v for k, v in self._init.items() if k not in _WHICH}}
        if self._entries == 0:
            return wandb.init(**init, id=self._id, resume="allow")
        try:
            return wandb.init(**init, resume_from=f"{self._id}?_step={self._entries - 1}")
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            warnings.warn(
                f"Weights & Biases cannot rewind the run {self._id} to its entry {self._entries}, and what it has "
                f"logged after the checkpoint will be there twice: {error}",
                stacklevel=2,
            )
            return wandb.init(**init, id=self._id, resume="allow")

    def add_config(self, config: str) -> None:
        """Writes the config as text, under `config`: with the first entry, for a resumed run is known only then."""
        self._add_text("config", config)

    def add_graph(self, graph: str) -> None:
        """Writes the description of the model as text, under `graph`."""
        self._add_text("graph", graph)

    def _add_text(self, name: str, text: str) -> None:
        _wandb()  # a missing package is an error here, and not at the end of the run
        self._texts[name] = text
        if self._run is not None:
            self._write_texts()

    def _write_texts(self) -> None:
        if self._texts:
            self._run.config.update(self._texts, allow_val_change=True)
            self._texts = {}

    def _log(self, entry: Mapping[str, Any], step: int) -> None:
        self.experiment.log({**entry, "step": step})
        self._entries += 1

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes `image`, uint8[H, W, C]."""
        encode_png(image)  # says what is wrong with an image that is none
        array = np.asarray(image)
        plain = array[..., 0] if array.shape[-1] == 1 else array
        self._log({name: _wandb().Image(plain)}, step)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Writes the bins of the histogram."""
        bins = _wandb().Histogram(np_histogram=(histogram.counts, histogram.edges))
        self._log({name: bins}, step)

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Writes the values of one step together; `file_path` is for backends of files and does nothing here."""
        self._log({name: to_plain(value) for name, value in scalar_dict.items()}, step)

    def state_dict(self) -> dict[str, Any]:
        """The run, and how many entries it has."""
        return {} if self._id is None else {"id": self._id, "entries": self._entries}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Goes on with the run of the checkpoint as it stood then, unless one is under way."""
        if "id" in state_dict and self._run is None:
            self._id, self._entries = state_dict["id"], state_dict["entries"]

    def close(self) -> None:
        """Ends the run; a later call continues it."""
        if self._texts:
            _ = self.experiment
        if self._run is not None:
            self._run.finish()
            self._run = None


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError("WandbVisBackend needs wandb: pip install 'jengine[wandb]'") from error
    return wandb
