"""Backend for Weights & Biases."""

import os
import types
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config.errors import ConfigError
from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import RunVisBackend, array_to_list
from jengine.logging.convert import Histogram, to_pixels

# arguments of `wandb.init` that select a run
_RUN_SELECTION = ("id", "resume", "resume_from", "fork_from")


@VISBACKENDS.register_module()
class WandbVisBackend(RunVisBackend):
    """A run in Weights & Biases with everything.

    Offline, files below `save_dir` for a later `wandb sync`.

    Each entry has a `step`, the x-axis in all plots: W&B's counter cannot decrease, while
    validations may count in epochs. A resumed run continues the W&B run in the checkpoint and
    rewinds it to the last entry there (`resume_from` in `wandb.init`); offline, the files record
    the rewind, and `wandb sync` performs it.

    Args:
      init_kwargs: for `wandb.init`: `project`, `name`, `mode='offline'`, ….
      define_metric_cfg: name -> summary for `define_metric`, such as `{'val/accuracy': 'max'}`, or
        a list with the arguments of each call: `[dict(name='val/loss', summary='min',
        goal='minimize')]`.
      log_code_name: name of an artifact with the source files in the working directory; None
        uploads none.
    """

    extra = package = "wandb"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        init_kwargs: Mapping[str, Any] | None = None,
        define_metric_cfg: Mapping[str, str] | Sequence[Mapping[str, Any]] | None = None,
        log_code_name: str | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._init_kwargs = dict(init_kwargs or {})
        metrics = define_metric_cfg or {}
        if isinstance(metrics, Mapping):
            metrics = [dict(name=name, summary=summary) for name, summary in metrics.items()]
        for i, metric in enumerate(metrics):
            if "name" not in metric:
                raise ConfigError(
                    f"`define_metric_cfg[{i}]` must have the key 'name', got {sorted(metric)}"
                )
        self._metrics = [dict(metric) for metric in metrics]
        self._log_code_name = log_code_name
        self._num_entries = 0  # W&B's own counter

    def _open_run(self) -> Any:
        wandb = self._import_package()
        self.save_dir.mkdir(parents=True, exist_ok=True)
        run = self._start_run(wandb)
        run.define_metric("*", step_metric="step")  # instead of its own counter
        for metric in self._metrics:
            run.define_metric(**{"step_metric": "step", **metric})
        if self._log_code_name is not None:
            run.log_code(name=self._log_code_name)
        return run

    def _write_text(self, name: str, text: str) -> None:
        self.experiment.config.update({name: text}, allow_val_change=True)

    def _end_run(self) -> None:
        self.experiment.finish()

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C]."""
        self._log({name: self._import_package().Image(to_pixels(image))}, step)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write the histogram bins."""
        self._log(
            {
                name: self._import_package().Histogram(
                    np_histogram=(histogram.counts, histogram.edges)
                )
            },
            step,
        )

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write the values of one step as one entry; `file_path` is ignored."""
        self._log({name: array_to_list(value) for name, value in scalar_dict.items()}, step)

    def state_dict(self) -> dict[str, Any]:
        """Return the run id and the number of entries."""
        return {} if self._run_id is None else {"id": self._run_id, "entries": self._num_entries}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Continue the run in the checkpoint after the last entry there, unless a run is open."""
        if "id" in state_dict and self._experiment is None:
            self._run_id = state_dict["id"]
            self._num_entries = state_dict["entries"]

    def _start_run(self, wandb: types.ModuleType) -> Any:
        """Start a new run, or continue that in the checkpoint."""
        if self._run_id is None:
            run = wandb.init(**{"dir": str(self.save_dir), **self._init_kwargs})
            # step > 0 if `init_kwargs` select an existing run
            self._run_id = run.id
            self._num_entries = run.step
            return run
        # The checkpoint's run is selected instead, and W&B rejects two selections.
        kwargs = {k: v for k, v in self._init_kwargs.items() if k not in _RUN_SELECTION}
        init = {"dir": str(self.save_dir), **kwargs}
        if self._num_entries == 0:
            return wandb.init(**init, id=self._run_id, resume="allow")
        try:
            return wandb.init(**init, resume_from=f"{self._run_id}?_step={self._num_entries - 1}")
        except (wandb.errors.CommError, wandb.errors.UsageError) as error:
            warnings.warn(
                f"Weights & Biases cannot rewind the run {self._run_id} to its entry "
                f"{self._num_entries}, so entries "
                f"logged after the checkpoint will appear twice: {error}",
                stacklevel=2,
            )
            return wandb.init(**init, id=self._run_id, resume="allow")

    def _log(self, entry: Mapping[str, Any], step: int) -> None:
        # Not `step=`: W&B drops entries whose step is below the last, as validations and images may
        # be.
        self.experiment.log({**entry, "step": step})
        self._num_entries += 1
