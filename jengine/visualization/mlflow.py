"""The backend of MLflow."""

import collections
import os
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from jengine.registry import VISBACKENDS
from jengine.visualization.backend import BaseVisBackend
from jengine.visualization.convert import Histogram, encode_png, to_number


@VISBACKENDS.register_module()
class MLflowVisBackend(BaseVisBackend):
    """Writes scalars as metrics of an MLflow run, and images, histograms, config and graph as its artifacts.

    Values that are no numbers are left out. A resumed run continues the run of its checkpoint. MLflow cannot take back
    what was logged after the checkpoint: those numbers stay, and are not logged a second time when their steps are done
    again.

    Args:
      save_dir: the directory for its files.
      exp_name: the experiment; made where there is none.
      run_name: what the run is called; MLflow finds a name by default.
      tags: of the run.
      params: of the run.
      tracking_uri: a server or a store; by default the files `<save_dir>/mlruns`.
    """

    def __init__(
        self,
        save_dir: str | os.PathLike[str],
        exp_name: str = "jengine",
        run_name: str | None = None,
        tags: Mapping[str, Any] | None = None,
        params: Mapping[str, Any] | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        super().__init__(save_dir)
        self._uri = (self.save_dir.absolute() / "mlruns").as_uri() if tracking_uri is None else tracking_uri
        self._exp_name = exp_name
        self._run_name = run_name
        self._tags = dict(tags or {})
        self._params = dict(params or {})
        self._texts: dict[str, str] = {}  # files that wait until there is a run
        self._counts: collections.Counter[str] = collections.Counter()  # numbers that the run has, by metric
        self._there: dict[str, collections.Counter[int]] | None = None  # steps after the checkpoint, by metric
        self._client: Any = None
        self._run_id: str | None = None

    @property
    def experiment(self) -> Any:
        """The `MlflowClient`, with a run that is under way, made at the first use.

        Raises:
          ImportError: mlflow is not installed.
        """
        if self._client is None:
            client = _client(self._uri)
            if self._run_id is None:
                known = client.get_experiment_by_name(self._exp_name)
                exp_id = client.create_experiment(self._exp_name) if known is None else known.experiment_id
                run = client.create_run(exp_id, tags=self._tags or None, run_name=self._run_name)
                self._run_id = run.info.run_id
                for name, value in self._params.items():
                    client.log_param(self._run_id, name, value)
            else:
                client.update_run(self._run_id, status="RUNNING")
            self._client = client
            self._write_texts()
        return self._client

    def add_config(self, config: str) -> None:
        """Writes the artifact `config.py`: with the first value, for a resumed run is known only then."""
        self._add_text("config.py", config)

    def add_graph(self, graph: str) -> None:
        """Writes the artifact `graph.txt`."""
        self._add_text("graph.txt", graph)

    def _add_text(self, name: str, text: str) -> None:
        _client_class()  # a missing package is an error here, and not at the end of the run
        self._texts[name] = text
        if self._client is not None:
            self._write_texts()

    def _write_texts(self) -> None:
        for name, text in self._texts.items():
            self._client.log_text(self._run_id, text, name)
        self._texts = {}

    def add_image(self, name: str, image: np.ndarray, step: int = 0) -> None:
        """Writes the artifact `images/<name>_<step>.png` of `image`, uint8[H, W, C]."""
        encode_png(image)  # says what is wrong with an image that is none
        self.experiment.log_image(self._run_id, np.asarray(image), f"images/{name}_{step}.png")

    def add_histogram(self, name: str, histogram: Histogram, step: int = 0) -> None:
        """Writes the artifact `histograms/<name>_<step>.json` with the counts and the edges of the bins."""
        bins = {"counts": histogram.counts.tolist(), "edges": histogram.edges.tolist()}
        self.experiment.log_dict(self._run_id, bins, f"histograms/{name}_{step}.json")

    def add_scalars(self, scalar_dict: Mapping[str, Any], step: int = 0, file_path: str | None = None) -> None:
        """Writes the numbers of one step together; `file_path` is for backends of files and does nothing here."""
        client = self.experiment
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        numbers = {name: to_number(value) for name, value in scalar_dict.items() if name != "step"}
        metrics = [Metric(name, number, now, int(step)) for name, number in numbers.items() if number is not None]
        client.log_batch(self._run_id, metrics=[metric for metric in metrics if not self._is_there(metric)])
        self._counts.update(metric.key for metric in metrics)

    def _is_there(self, metric: Any) -> bool:
        """Whether the resumed run had logged this step of the metric before; each is asked for once."""
        if self._there is None:
            return False
        name = metric.key
        if name not in self._there:
            history = self._client.get_metric_history(self._run_id, name)
            in_order = sorted(history, key=lambda m: (m.timestamp, m.step))
            self._there[name] = collections.Counter(m.step for m in in_order[self._counts[name] :])
        found = self._there[name][metric.step] > 0
        self._there[name][metric.step] -= found
        return found

    def state_dict(self) -> dict[str, Any]:
        """The run, and how many numbers it has."""
        return {} if self._run_id is None else {"run_id": self._run_id, "counts": dict(self._counts)}

    def load_state_dict(self, state_dict: Mapping[str, Any], step: int) -> None:
        """Continues the run of the checkpoint, unless one is under way."""
        if "run_id" in state_dict and self._client is None:
            self._run_id, self._counts = state_dict["run_id"], collections.Counter(state_dict["counts"])
            self._there = {}

    def close(self) -> None:
        """Ends the run; a later call continues it."""
        if self._texts:
            _ = self.experiment
        if self._client is not None:
            self._client.set_terminated(self._run_id)
            self._client = None


def _client(uri: str) -> Any:
    if uri.startswith("file:"):
        # MLflow refuses a store of files, which it maintains but no longer extends, unless it is told that it is wanted
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
    return _client_class()(tracking_uri=uri)


def _client_class() -> Any:
    try:
        from mlflow.tracking import MlflowClient
    except ImportError as error:
        raise ImportError("MLflowVisBackend needs mlflow: pip install 'jengine[mlflow]'") from error
    return MlflowClient
