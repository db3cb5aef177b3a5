"""Backend for Trackio."""

import os
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import RunVisBackend, to_numbers
from jengine.logging.convert import Histogram, to_pixels

# Trackio would also record the load of the machine, and open its dashboard in a notebook.
_QUIET = dict.fromkeys(("auto_log_cpu", "auto_log_gpu", "embed"), False)
# Names that Trackio uses itself
_RESERVED = ("metrics", "project", "run", "time", "timestamp")


@VISBACKENDS.register_module()
class TrackioVisBackend(RunVisBackend):
    """A run in Trackio with everything, on this machine, on a server or in a Space of Hugging Face.

    Without a `space_id` or a `server_url`, Trackio writes to the directory in the environment
    variable TRACKIO_DIR, by default below the cache of Hugging Face; `trackio show` draws it.
    Config and graph are reports. Values that are not numbers are skipped, and `time` of a training
    line is `train/time`, as Trackio has a `time` of its own. A resumed run continues the run with
    the name in the checkpoint; values logged after the checkpoint stay, next to those of repeated
    steps.

    Args:
      init_kwargs: for `trackio.init`: `project`, `name`, `space_id`, ….
    """

    extra = package = "trackio"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        init_kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._init_kwargs = {"project": "jengine", **_QUIET, **(init_kwargs or {})}

    def _open_run(self) -> Any:
        # A run is found by its name alone
        resumed = {} if self._run_id is None else {"name": self._run_id, "resume": "allow"}
        run = self._import_package().init(**{**self._init_kwargs, **resumed})
        self._run_id = run.name
        return run

    def _write_text(self, name: str, text: str) -> None:
        # Its `config` is sent with the first values and never again.
        report = self._import_package().Markdown(f"```\n{text}\n```")
        self.experiment.log({name: report}, step=0)

    def _end_run(self) -> None:
        self.experiment.finish()

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C]."""
        self.experiment.log({name: self._import_package().Image(to_pixels(image))}, step=step)

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write the histogram bins."""
        bins = self._import_package().Histogram(np_histogram=(histogram.counts, histogram.edges))
        self.experiment.log({name: bins}, step=step)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write the numbers of one step; `file_path` is ignored."""
        numbers = to_numbers(scalar_dict)
        entry = {f"train/{k}" if k in _RESERVED else k: number for k, number in numbers.items()}
        self.experiment.log(entry, step=step)
