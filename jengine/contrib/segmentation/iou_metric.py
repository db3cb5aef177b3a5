"""Semantic segmentation metrics from one confusion matrix."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.annotations import Count
from jengine.evaluation.metric import BaseMetric, example_mask
from jengine.logging import format_table, print_log
from jengine.model.labels import require_class_indices
from jengine.registry import METRICS
from jengine.selection import Selector, select_array


class Confusion(NamedTuple):
    """Pixel counts by true class (row) and predicted class (column; the last for invalid classes), up to 2**64 each."""

    low: jax.Array  # uint32[C, C + 1], low words
    high: jax.Array  # uint32[C, C + 1], high words
    has_invalid: jax.Array  # bool[], whether a label was out of range


@METRICS.register_module()
class IoUMetric(BaseMetric):
    """Pixel accuracy `aAcc`, mean intersection over union `mIoU` and mean class accuracy `mAcc`, as fractions.

    Counts are integers on the device, so that results do not depend on the batch size. Padded examples and pixels with
    `ignore_index` are ignored. Another label out of range makes all results NaN; in a run it is an error. `mIoU` leaves
    out classes that occur in neither labels nor predictions, `mAcc` classes that do not occur in the labels. A table
    with one row per class is logged.

    >>> metric = IoUMetric(num_classes=2)
    >>> labels = jnp.array([[[0, 0], [1, 1]]])
    >>> state = metric.update(metric.init(), labels.at[0, 0, 1].set(1), {"label": labels})
    >>> metric.compute(jax.device_get(state))["aAcc"]
    0.75

    Args:
      num_classes: number of classes; by default the number of `classes` in the dataset's metainfo.
      ignore_index: label for pixels to ignore.
      label: batch entry with the true classes, int[B, H, W]: a name, index or dotted path.
      prediction: prediction entry, logits float[B, H, W, C] or class indices int[B, H, W]; None if the predictions are
        an array.
      prefix: prefix for the result names; none by default.
    """

    def __init__(
        self,
        num_classes: Count | None = None,
        ignore_index: int = 255,
        label: Selector = "label",
        prediction: Selector | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        if num_classes is not None and num_classes < 2:
            raise ValueError(f"IoUMetric: `num_classes` must be at least 2, got {num_classes}")
        self.num_classes = num_classes
        self.ignore_index = ignore_index
        self.label = label
        self.prediction = prediction

    @property
    def names(self) -> tuple[str, ...]:
        """`aAcc`, `mIoU`, `mAcc`."""
        return ("aAcc", "mIoU", "mAcc")

    def init(self) -> Confusion:
        """Return an empty confusion matrix."""
        shape = (self._get_num_classes(), self._get_num_classes() + 1)
        return Confusion(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32), jnp.zeros((), bool))

    def update(self, state: Confusion, predictions: Any, batch: Any) -> Confusion:
        """Add the pixels in a batch, without the padding."""
        labels = select_array(batch, self.label, "IoUMetric.label", "batch")
        predictions = select_array(predictions, self.prediction, "IoUMetric.prediction", "predictions")
        num_classes = self._get_num_classes()
        require_class_indices(labels, num_classes, "IoUMetric.label", self.ignore_index)
        labels = jnp.asarray(labels)
        labels = labels.astype(jnp.int32) if jnp.issubdtype(labels.dtype, jnp.integer) else labels
        predicted = _class_indices(jnp.asarray(predictions), labels, num_classes)
        is_counted = example_mask(batch).reshape(-1, *(1,) * (labels.ndim - 1))
        is_counted = is_counted & (labels != self.ignore_index)
        is_invalid = is_counted & ((labels < 0) | (labels >= num_classes))
        is_counted &= ~is_invalid
        column = jnp.where((predicted >= 0) & (predicted < num_classes), predicted, num_classes)
        shape = (num_classes, num_classes + 1)
        num_cells = num_classes * (num_classes + 1)
        cell = jnp.where(is_counted, labels * (num_classes + 1) + column, num_cells)  # the extra cell is dropped
        added = jnp.zeros(num_cells + 1, jnp.uint32).at[cell.reshape(-1)].add(1)[:-1].reshape(shape)
        low = state.low + added
        high = state.high + (low < added).astype(jnp.uint32)  # a carry: the low word has wrapped around
        return Confusion(low, high, state.has_invalid | is_invalid.any())

    def compute(self, state: Confusion) -> dict[str, float]:
        """Return the three fractions; NaN where no pixel was counted, and with labels out of range."""
        if state.has_invalid:
            return dict.fromkeys(self.names, float("nan"))
        matrix = state.low.astype(np.float64) + state.high.astype(np.float64) * 2.0**32
        correct = np.diagonal(matrix)
        true, predicted = matrix.sum(axis=1), matrix[:, :-1].sum(axis=0)
        iou = _divide(correct, true + predicted - correct)
        accuracy = _divide(correct, true)
        classes = self.dataset_meta.get("classes", ())
        names = classes if len(classes) == len(iou) else range(len(iou))
        rows = [(str(name), f"{i:.4f}", f"{a:.4f}") for name, i, a in zip(names, iou, accuracy, strict=True)]
        print_log("\n" + format_table(("class", "IoU", "Acc"), rows), logger="current")
        return {"aAcc": float(_divide(correct.sum(), true.sum())), "mIoU": _nanmean(iou), "mAcc": _nanmean(accuracy)}

    def _get_num_classes(self) -> int:
        num_classes = self.num_classes or len(self.dataset_meta.get("classes", ()))
        if not num_classes:
            raise ValueError(
                "IoUMetric: `num_classes` must be given unless the dataset's metainfo has 'classes', got None"
            )
        return num_classes


def _class_indices(predictions: jax.Array, labels: jax.Array, num_classes: int) -> jax.Array:
    """Return the predicted classes, with the shape of the labels, from logits or class indices."""
    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(f"IoUMetric: labels must be integers, got {labels.dtype}")
    if predictions.shape == (*labels.shape, num_classes):
        return predictions.argmax(axis=-1)
    if predictions.shape == labels.shape and jnp.issubdtype(predictions.dtype, jnp.integer):
        return predictions.astype(jnp.int32)
    raise ValueError(
        f"IoUMetric: predictions must be logits float[B, H, W, {num_classes}] or class indices int[B, H, W] for labels "
        f"{labels.dtype}{list(labels.shape)}, got {predictions.dtype}{list(predictions.shape)}"
    )


def _divide(numerator: Any, denominator: Any) -> np.ndarray:
    """Divide, with NaN for a denominator of 0."""
    denominator = np.asarray(denominator)
    return np.divide(numerator, denominator, out=np.full(denominator.shape, np.nan), where=denominator > 0)


def _nanmean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN, without NumPy's warning if there are none."""
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if valid.size else float("nan")
