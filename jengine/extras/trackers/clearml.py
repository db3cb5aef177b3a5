"""Backend for ClearML."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import RunVisBackend, to_numbers
from jengine.logging.convert import Histogram, to_pixels

_MODES = ("train", "val", "test")
# ClearML would also record what other libraries write, and the terminal.
_QUIET = dict.fromkeys(
    (
        "auto_connect_arg_parser",
        "auto_connect_frameworks",
        "auto_connect_streams",
        "auto_resource_monitoring",
    ),
    False,
)


@VISBACKENDS.register_module()
class ClearMLVisBackend(RunVisBackend):
    """Scalars, images, histograms, config and graph in a task of ClearML.

    Training and validation of a metric share a plot. Values that are not numbers are skipped. A
    resumed run continues the task in the checkpoint; values logged after the checkpoint stay in the
    task, next to those of repeated steps.

    Args:
      init_kwargs: for `Task.init`: `project_name`, `task_name`, `tags`, `output_uri`, ….
      offline: write to ClearML's cache directory, for a later `Task.import_offline_session`.
    """

    extra = package = "clearml"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        init_kwargs: Mapping[str, Any] | None = None,
        offline: bool = False,
    ) -> None:
        super().__init__(save_dir)
        self._init_kwargs = {"project_name": "jengine", **(init_kwargs or {})}
        self._offline = offline

    def _open_run(self) -> Any:
        task_class = self._import_package().Task
        if self._offline:
            task_class.set_offline(True)
        # A fork of this process, with JAX's threads, would send the values: it can wait for a lock
        # forever. There is no argument for it, only `sdk.development.report_use_subprocess` in
        # clearml.conf.
        task_class._report_subprocess_enabled = False
        arguments: dict[str, Any] = {**_QUIET, "reuse_last_task_id": False, **self._init_kwargs}
        if self._run_id is not None:
            # With 0 the steps stay as they are; otherwise ClearML counts on from the last one.
            arguments |= {"reuse_last_task_id": self._run_id, "continue_last_task": 0}
        task = task_class.init(**arguments)
        self._run_id = task.id
        return task

    def _write_text(self, name: str, text: str) -> None:
        self.experiment.set_configuration_object(name, config_text=text)

    def _end_run(self) -> None:
        self.experiment.close()

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C]."""
        self.experiment.get_logger().report_image(
            name, name, iteration=step, image=to_pixels(image)
        )

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write the counts, labelled with the left edges of the bins."""
        labels = [f"{edge:.4g}" for edge in histogram.edges[:-1]]
        self.experiment.get_logger().report_histogram(
            name, name, values=histogram.counts.tolist(), iteration=step, xlabels=labels
        )

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write the numbers of one step, `val/loss` as the series `val` in the plot `loss`.

        `file_path` is ignored.
        """
        logger = self.experiment.get_logger()
        for name, number in to_numbers(scalar_dict).items():
            mode, _, rest = name.partition("/")
            title, series = (rest, mode) if rest and mode in _MODES else (name, "train")
            logger.report_scalar(title, series, value=number, iteration=step)
