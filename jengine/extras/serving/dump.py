"""Evaluation predictions as a file."""

import io
import os
import pickle
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.config.registry import METRICS
from jengine.config.storage import is_url, storage_path, write_bytes
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import HostMetric, Predictions
from jengine.model.model import ArrayTree


@METRICS.register_module()
class DumpResults(HostMetric):
    """Writes the predictions to a file and has no results of its own.

    `Evaluator.offline_evaluate` reads them.

    With several processes the first one writes the predictions of all, in the order of the dataset.
    Every evaluation replaces the file.

    >>> import tempfile
    >>> path = f"{tempfile.mkdtemp()}/predictions.npz"
    >>> metric = DumpResults(path)
    >>> metric.process({}, {"logits": np.zeros((3, 10))})
    >>> metric.collect(None), np.load(path)["logits"].shape
    ({}, (3, 10))

    Args:
      out_file_path: file with the ending `.pkl` or `.pickle`, for a list with the prediction for
        each example; or `.npz`, for arrays by dotted path, `predictions` if there are no names.
    """

    has_results = False

    def __init__(self, out_file_path: str) -> None:
        super().__init__()
        if not out_file_path.endswith((".pkl", ".pickle", ".npz")):
            raise ConfigError(
                "`DumpResults.out_file_path` must end with .pkl, .pickle or .npz, got "
                f"{out_file_path!r}"
            )
        self.out_file_path = out_file_path

    def process(self, data_batch: Batch, data_samples: Predictions) -> None:
        """Keep the predictions for a batch."""
        self.results.append(data_samples)

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Write the file."""
        # By leaf: files hold one array for each entry of a prediction, as the npz format wants it.
        predictions = jax.tree.map(lambda *arrays: np.concatenate(arrays), *results)
        if self.out_file_path.endswith(".npz"):
            write_arrays(self.out_file_path, predictions)
        else:
            count = len(jax.tree.leaves(predictions)[0])
            samples = [jax.tree.map(lambda array, i=i: array[i], predictions) for i in range(count)]
            _write(self.out_file_path, pickle.dumps(samples))
        return {}


def write_arrays(path: str | os.PathLike[str], arrays: ArrayTree) -> dict[str, np.ndarray]:
    """Write a pytree of NumPy arrays as an .npz file, with dotted paths as names, or `predictions`
    for a single array.

    Returns:
      The arrays by name. A dtype that NumPy does not have, such as bfloat16, could not be read
        again: it is float32.
    """
    named = {
        name or "predictions": leaf.astype(np.float32) if leaf.dtype.kind == "V" else leaf
        for name, leaf in paths.flatten(arrays).items()
    }
    buffer = io.BytesIO()
    np.savez(buffer, **named)
    _write(path, buffer.getvalue())
    return named


def _write(path: str | os.PathLike[str], data: bytes) -> None:
    target = storage_path("path", path)
    if not is_url(target):
        target.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(target, data)  # atomic: no reader sees half a file
