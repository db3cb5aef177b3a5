"""Metrics of semantic segmentation from one confusion matrix."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.errors import closest
from jengine.evaluation.metric import BaseMetric, real_rows
from jengine.logging import format_table, print_log
from jengine.registry import METRICS


class Confusion(NamedTuple):
    """Pixels by true class (row) and predicted class (column; the last is 'no class'), exact up to 2**64 of each."""

    low: jax.Array  # uint32[C, C + 1]
    high: jax.Array  # uint32[C, C + 1], what `low` has carried


@METRICS.register_module()
class IoUMetric(BaseMetric):
    """Pixel accuracy `aAcc`, mean intersection over union `mIoU` and mean class accuracy `mAcc`, as fractions.

    Counts are integers that stay on the device, so the results are the same for any batch size. Left out are padded
    rows, pixels of `ignore_index`, and pixels whose label is no class. A class that neither labels nor predictions
    have is left out of `mIoU`, one that the labels do not have out of `mAcc`. A table of the classes is logged.

    Args:
      num_classes: how many classes there are; by default as many as `classes` in the dataset's metainfo.
      ignore_index: the label of pixels that do not count.
      label: the batch's entry with the true classes, int[B, H, W].
      prediction: the entry of the predictions to use, where they are a dict. Logits float[B, H, W, C], or class
        numbers int[B, H, W].
      prefix: stands before the names of the results; none by default.

    Raises:
      ValueError: fewer than two classes.
    """

    def __init__(
        self,
        num_classes: int | None = None,
        ignore_index: int = 255,
        label: str = "label",
        prediction: str | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"IoUMetric: num_classes is at least 2, found {num_classes}")
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label = label
        self.prediction = prediction

    @property
    def names(self) -> tuple[str, ...]:
        """`aAcc`, `mIoU`, `mAcc`."""
        return ("aAcc", "mIoU", "mAcc")

    def init(self) -> Confusion:
        """No pixel yet.

        Raises:
          ValueError: the number of classes is neither given nor known from the dataset.
        """
        shape = (self._classes(), self._classes() + 1)
        return Confusion(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))

    def update(self, state: Confusion, predictions: Any, batch: Any) -> Confusion:
        """Counts the pixels of the real rows.

        Raises:
          KeyError: no such entry in batch or predictions. ValueError: shapes that do not belong together.
        """
        labels = jnp.asarray(_entry("the batch", batch, self.label, "label"))
        labels = labels.astype(jnp.int32) if jnp.issubdtype(labels.dtype, jnp.integer) else labels
        if self.prediction is not None or isinstance(predictions, Mapping):
            predictions = _entry("the predictions", predictions, self.prediction, "prediction")
        classes = self._classes()
        found = _class_numbers(jnp.asarray(predictions), labels, classes)
        counts = real_rows(batch).reshape(-1, *(1,) * (labels.ndim - 1))
        counts = counts & (labels != self.ignore_index) & (labels >= 0) & (labels < classes)
        column = jnp.where((found >= 0) & (found < classes), found, classes)
        cells = classes * (classes + 1)
        cell = jnp.where(counts, labels * (classes + 1) + column, cells)
        added = jnp.zeros(cells + 1, jnp.uint32).at[cell.reshape(-1)].add(1)[:-1].reshape(classes, classes + 1)
        low = state.low + added
        return Confusion(low, state.high + (low < added).astype(jnp.uint32))

    def compute(self, state: Confusion) -> dict[str, float]:
        """The three fractions; NaN where nothing counted."""
        matrix = state.low.astype(np.float64) + state.high.astype(np.float64) * 2.0**32
        right = np.diagonal(matrix)
        true, predicted = matrix.sum(axis=1), matrix[:, :-1].sum(axis=0)
        iou = _divide(right, true + predicted - right)
        accuracy = _divide(right, true)
        self._log(iou, accuracy)
        return {
            "aAcc": float(_divide(right.sum(), true.sum())),
            "mIoU": _mean(iou),
            "mAcc": _mean(accuracy),
        }

    def _log(self, iou: np.ndarray, accuracy: np.ndarray) -> None:
        classes = self.dataset_meta.get("classes", ())
        names = classes if len(classes) == len(iou) else range(len(iou))
        rows = [(str(name), f"{i:.4f}", f"{a:.4f}") for name, i, a in zip(names, iou, accuracy, strict=True)]
        print_log("\n" + format_table(("class", "IoU", "Acc"), rows), logger="current")

    def _classes(self) -> int:
        known = self.num_classes or len(self.dataset_meta.get("classes", ()))
        if not known:
            raise ValueError(
                "IoUMetric does not know how many classes there are: give num_classes, or a dataset whose metainfo has "
                "'classes'"
            )
        return known


def _class_numbers(predictions: jax.Array, labels: jax.Array, classes: int) -> jax.Array:
    """Predictions as class numbers of the shape of the labels."""
    logits = predictions.ndim == labels.ndim + 1 and predictions.shape[-1] == classes
    numbers = predictions.ndim == labels.ndim and jnp.issubdtype(predictions.dtype, jnp.integer)
    if predictions.shape[: labels.ndim] != labels.shape or not (logits or numbers):
        raise ValueError(
            f"IoUMetric takes logits float[B, H, W, {classes}] or class numbers int[B, H, W] and labels int[B, H, W]; "
            f"found predictions {predictions.dtype}{list(predictions.shape)} and labels "
            f"{labels.dtype}{list(labels.shape)}"
        )
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"labels are integers, the class numbers; found {labels.dtype}")
    return predictions.argmax(axis=-1) if logits else predictions.astype(jnp.int32)


def _divide(part: Any, whole: Any) -> np.ndarray:
    whole = np.asarray(whole)
    return np.divide(part, whole, out=np.full(whole.shape, np.nan), where=whole > 0)


def _mean(values: np.ndarray) -> float:
    known = values[~np.isnan(values)]
    return float(known.mean()) if known.size else float("nan")


def _entry(owner: str, tree: Any, key: str | None, argument: str) -> Any:
    """`tree[key]`, with an error that says what there is instead."""
    names = sorted(map(str, tree)) if isinstance(tree, Mapping) else []
    if key is None or not isinstance(tree, Mapping) or key not in tree:
        problem = f"are a dict, say which entry with {argument}=" if key is None else f"has no entry {key!r}"
        raise KeyError(f"IoUMetric: {owner} {problem}{closest(key or '', names)}")
    return tree[key]
