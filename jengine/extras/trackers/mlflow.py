"""Backend for MLflow."""

import collections
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.config.registry import VISBACKENDS
from jengine.extras.trackers.run_backend import RunVisBackend, to_numbers
from jengine.logging.convert import Histogram, to_pixels


@VISBACKENDS.register_module()
class MLflowVisBackend(RunVisBackend):
    """Scalars as metrics in an MLflow run, and images, histograms, config and graph as artifacts.

    Values that are not numbers are skipped. A resumed run continues the MLflow run in the
    checkpoint. MLflow cannot delete metrics: values logged after the checkpoint stay, and are not
    logged again when steps are repeated.

    Args:
      exp_name: the experiment; created if it does not exist.
      run_name: the run name; MLflow generates one by default.
      tags: tags for the run.
      params: params for the run.
      tracking_uri: a server or a store; by default the directory `<save_dir>/mlruns`.
      artifact_location: where a new experiment keeps the artifacts; chosen by the server or the
        store by default.
    """

    extra = "mlflow"
    package = "mlflow.tracking"
    text_names = ("config.py", "graph.txt")

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        exp_name: str = "jengine",
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
        artifact_location: str | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._uri = (
            (self.save_dir.absolute() / "mlruns").as_uri() if tracking_uri is None else tracking_uri
        )
        self._exp_name = exp_name
        self._artifact_location = artifact_location
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._params = dict(params or {})
        # number of logged values by metric
        self._counts: collections.Counter[str] = collections.Counter()
        # Steps logged after the checkpoint, by metric; None in a run that was not resumed.
        self._logged_steps: dict[str, collections.Counter[int]] | None = None

    def _open_run(self) -> Any:
        if self._uri.startswith("file:"):
            # MLflow still maintains file stores, but refuses to use one without this opt-in
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        client = self._import_package().MlflowClient(tracking_uri=self._uri)
        if self._run_id is not None:
            # The interrupted run may have been marked as finished or failed.
            client.update_run(self._run_id, status="RUNNING")
            return client
        existing = client.get_experiment_by_name(self._exp_name)
        if existing is None:
            exp_id = client.create_experiment(
                self._exp_name, artifact_location=self._artifact_location
            )
        else:
            exp_id = existing.experiment_id
        run = client.create_run(exp_id, tags=self._tags or None, run_name=self._run_name)
        self._run_id = run.info.run_id
        for name, value in self._params.items():
            client.log_param(self._run_id, name, value)
        return client

    def _write_text(self, name: str, text: str) -> None:
        self.experiment.log_text(self._run_id, text, name)

    def _end_run(self) -> None:
        self.experiment.set_terminated(self._run_id)

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Write `image`, uint8[H, W, C], as the artifact `images/<name>_<step>.png`."""
        self.experiment.log_image(self._run_id, to_pixels(image), f"images/{name}_{step}.png")

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Write counts and bin edges as the artifact `histograms/<name>_<step>.json`."""
        bins = {"counts": histogram.counts.tolist(), "edges": histogram.edges.tolist()}
        self.experiment.log_dict(self._run_id, bins, f"histograms/{name}_{step}.json")

    def add_scalars(
        self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None
    ) -> None:
        """Log the numbers of one step in one batch; `file_path` is ignored."""
        client = self.experiment
        from mlflow.entities import Metric

        now = int(time.time() * 1000)  # MLflow counts milliseconds
        metrics = [
            Metric(name, number, now, int(step)) for name, number in to_numbers(scalar_dict).items()
        ]
        client.log_batch(
            self._run_id, metrics=[metric for metric in metrics if not self._is_logged(metric)]
        )
        self._counts.update(metric.key for metric in metrics)

    def state_dict(self) -> dict[str, Any]:
        """Return the run id and the number of values by metric."""
        return (
            {} if self._run_id is None else {"run_id": self._run_id, "counts": dict(self._counts)}
        )

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Continue the run in the checkpoint, unless a run is open."""
        if "run_id" in state_dict and self._experiment is None:
            self._run_id = state_dict["run_id"]
            self._counts = collections.Counter(state_dict["counts"])
            self._logged_steps = {}

    def _is_logged(self, metric: Any) -> bool:
        """Return whether the run logged this metric and step before it was resumed.

        Each earlier value counts once.
        """
        if self._logged_steps is None:
            return False
        name = metric.key
        if name not in self._logged_steps:
            history = self.experiment.get_metric_history(self._run_id, name)
            in_order = sorted(history, key=lambda m: (m.timestamp, m.step))  # as they were logged
            self._logged_steps[name] = collections.Counter(
                m.step for m in in_order[self._counts[name] :]
            )
        is_logged = self._logged_steps[name][metric.step] > 0
        # A bool counts as 0 or 1.
        self._logged_steps[name][metric.step] -= is_logged
        return is_logged
