"""Backend for Comet."""

import io
import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import RunVisBackend, to_numbers
from jengine.logging.convert import encode_png

# Comet would also record what other libraries write, the terminal, and a summary at the end.
_QUIET: dict[str, Any] = {
    **dict.fromkeys(
        ("auto_param_logging", "auto_metric_logging", "auto_output_logging", "auto_log_co2"), False
    ),
    **dict.fromkeys(("log_code", "log_graph", "parse_args"), False),
    "display_summary_level": 0,
}


@VISBACKENDS.register_module()
class CometVisBackend(RunVisBackend):
    """Scalars and images of a Comet experiment, and config and graph as assets.

    Histograms as four scalars.

    Values that are not numbers are skipped. A resumed run continues the experiment in the
    checkpoint; values logged after the checkpoint stay in it, next to those of repeated steps.

    Args:
      init_kwargs: for `comet_ml.start`: `project_name`, `workspace`, `online=False`, …. Offline,
        archives below `save_dir` are for a later `comet upload`.
      experiment_kwargs: for `comet_ml.ExperimentConfig`: `name`, `tags`, `log_env_gpu`, ….
    """

    extra = "comet"
    package = "comet_ml"
    text_names = ("config.py", "graph.txt")

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        init_kwargs: Mapping[str, Any] | None = None,
        experiment_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._init_kwargs = {"project_name": "jengine", **(init_kwargs or {})}
        self._experiment_kwargs = dict(experiment_kwargs or {})

    def _open_run(self) -> Any:
        package = self._import_package()
        config = package.ExperimentConfig(
            **{**_QUIET, "offline_directory": str(self.save_dir), **self._experiment_kwargs}
        )
        # A run that is continued keeps its page, with one curve over all sessions.
        resumed = {} if self._run_id is None else {"experiment_key": self._run_id, "mode": "get"}
        experiment = package.start(**{**self._init_kwargs, **resumed}, experiment_config=config)
        self._run_id = experiment.get_key()
        return experiment

    def _write_text(self, name: str, text: str) -> None:
        self.experiment.log_asset_data(text, name=name, overwrite=True)

    def _end_run(self) -> None:
        self.experiment.end()

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C]."""
        self.experiment.log_image(io.BytesIO(encode_png(image)), name=name, step=step)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write the numbers of one step; `file_path` is ignored."""
        self.experiment.log_metrics(to_numbers(scalar_dict), step=step)
