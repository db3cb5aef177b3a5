"""The backend of Weights & Biases."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.registry import VISBACKENDS
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.histogram import Histogram
from jengine.visualization.image import encode_png
from jengine.visualization.values import to_plain


@VISBACKENDS.register_module()
class WandbVisBackend(BaseVisBackend):
    """Sends everything to a run of Weights & Biases; offline to files below `save_dir`, for `wandb sync` later.

    Each entry carries its `step`, which is the axis of all curves: the run's own counter only goes up, and validations
    count in epochs. A resumed run continues the run of its checkpoint.

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
            self._run = wandb.init(**{"dir": str(self.save_dir), **self._init})
            self._run.define_metric("*", step_metric="step")
            for name, summary in self._summaries.items():
                self._run.define_metric(name, step_metric="step", summary=summary)
            self._init["id"] = self._run.id
        return self._run

    def add_config(self, config: str) -> None:
        """Writes the config as text, under `config`."""
        self.experiment.config.update({"config": config}, allow_val_change=True)

    def add_graph(self, graph: str) -> None:
        """Writes the description of the model as text, under `graph`."""
        self.experiment.config.update({"graph": graph}, allow_val_change=True)

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes `image`, uint8[H, W, C]."""
        encode_png(image)  # says what is wrong with an image that is none
        array = np.asarray(image)
        plain = array[..., 0] if array.shape[-1] == 1 else array
        self.experiment.log({name: _wandb().Image(plain), "step": step})

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Writes the bins of the histogram."""
        bins = _wandb().Histogram(np_histogram=(histogram.counts, histogram.edges))
        self.experiment.log({name: bins, "step": step})

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Writes the values of one step together; `file_path` is for backends of files and does nothing here."""
        self.experiment.log({**{name: to_plain(value) for name, value in scalar_dict.items()}, "step": step})

    def state_dict(self) -> dict[str, Any]:
        """The name of the run."""
        return {"id": self._init["id"]} if "id" in self._init else {}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Continues the run of the checkpoint, unless one is under way; what it logged after it stays."""
        if "id" in state_dict and self._run is None:
            self._init.update(id=state_dict["id"], resume="allow")

    def close(self) -> None:
        """Ends the run; a later call continues it."""
        if self._run is not None:
            self._run.finish()
            self._run = None
            self._init["resume"] = "allow"


def _wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError("WandbVisBackend needs wandb: pip install 'jengine[wandb]'") from error
    return wandb
