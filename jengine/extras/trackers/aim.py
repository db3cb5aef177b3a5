"""Backend for Aim."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import RunVisBackend, to_numbers
from jengine.logging.convert import Histogram, to_pixels


@VISBACKENDS.register_module()
class AimVisBackend(RunVisBackend):
    """A run in Aim with everything, in a local repository or on a server of Aim.

    A resumed run continues the Aim run in the checkpoint. Aim keeps one value per step, so that the
    values of repeated steps replace those logged after the checkpoint. Values that are not numbers
    are skipped.

    Args:
      repo: a directory with a repository, or a server (`aim://host:port`); by default
        `<save_dir>/.aim`. Runs are compared within a repository: set one directory for all of them.
      experiment: the experiment name in Aim.
      run_name: the run name.
      tags: tags for the run.
    """

    extra = package = "aim"

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        repo: str | os.PathLike[str] | None = None,
        experiment: str | None = None,
        run_name: str | None = None,
        tags: Sequence[str] = (),
    ) -> None:
        super().__init__(save_dir)
        self._repo = str(self.save_dir if repo is None else repo)
        self._experiment_name = experiment
        self._run_name = run_name
        self._tags = tags
        self._is_resumed = False

    def _open_run(self) -> Any:
        if "://" not in self._repo:
            os.makedirs(self._repo, exist_ok=True)
        run = self._import_package().Run(
            self._run_id,
            repo=self._repo,
            experiment=self._experiment_name,
            force_resume=self._is_resumed,  # an interrupted run may have left its lock
            system_tracking_interval=None,  # jengine logs what it measures
            capture_terminal_logs=False,
        )
        if self._run_id is None:
            if self._run_name is not None:
                run.name = self._run_name
            for tag in self._tags:
                run.add_tag(tag)
        self._run_id = run.hash
        self._is_resumed = False
        return run

    def _write_text(self, name: str, text: str) -> None:
        self.experiment[name] = text

    def _end_run(self) -> None:
        self.experiment.close()

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C]."""
        self.experiment.track(
            self._import_package().Image(to_pixels(image), format="png"), name=name, step=step
        )

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write the histogram bins."""
        ends = float(histogram.edges[0]), float(histogram.edges[-1])
        distribution = self._import_package().Distribution(hist=histogram.counts, bin_range=ends)
        self.experiment.track(distribution, name=name, step=step)

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Write the numbers of one step; `file_path` is ignored."""
        for name, number in to_numbers(scalar_dict).items():
            self.experiment.track(number, name=name, step=step)

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Continue the run in the checkpoint, unless a run is open."""
        super().load_state_dict(state_dict, step)
        self._is_resumed = self._experiment is None and self._run_id is not None
