"""Semantic segmentation metrics from one confusion matrix."""

from collections.abc import Sequence
from typing import Literal

import numpy as np

from jengine.config.annotations import Count
from jengine.config.registry import METRICS
from jengine.extras.metrics.classification import Confusion, ConfusionMatrix, divide
from jengine.logging.console import current_logger
from jengine.logging.tables import format_table
from jengine.model.selection import Selector

Measure = Literal["mIoU", "mDice", "mFscore"]
# What is measured for each class
_COLUMNS: dict[Measure, tuple[str, ...]] = {
    "mIoU": ("IoU", "Acc"),
    "mDice": ("Dice", "Acc"),
    "mFscore": ("Fscore", "Precision", "Recall"),
}


@METRICS.register_module()
class IoUMetric(ConfusionMatrix):
    """Pixel accuracy `aAcc`, mean intersection over union `mIoU` and mean class accuracy `mAcc`, or
    other means over the classes, as fractions.

    Counts are integers on the device, so that results do not depend on the batch size. Padded
    examples and pixels with `ignore_index` are ignored. Another label out of range makes all
    results NaN; in a run it is an error. A mean leaves out classes for which a value is 0 / 0:
    `mIoU` those that occur in neither labels nor predictions, `mAcc` those without labels. A table
    with one row per class is logged.

    >>> metric = IoUMetric(num_classes=2)
    >>> labels = np.array([[[0, 0], [1, 1]]])
    >>> state = metric.update(metric.init(), np.array([[[0, 1], [1, 1]]]), {"label": labels})
    >>> metric.compute(state)["aAcc"]
    0.75

    Args:
      num_classes: number of classes; by default the number of `classes` in the dataset's metainfo.
      ignore_index: label for pixels to ignore.
      label: batch entry with the true classes, int[B, H, W]: a name, index or dotted path.
      prediction: prediction entry, logits float[B, H, W, C] or class indices int[B, H, W]; None if
        the predictions are an array.
      prefix: prefix for the result names; none by default.
      iou_metrics: one or several: 'mIoU', 'mDice' for `mDice` and `mAcc`, 'mFscore' for `mFscore`,
        `mPrecision` and `mRecall`.
    """

    def __init__(
        self,
        num_classes: Count | None = None,
        ignore_index: int = 255,
        label: Selector = "label",
        prediction: Selector | None = None,
        prefix: str | None = None,
        iou_metrics: Measure | Sequence[Measure] = ("mIoU",),
    ) -> None:
        super().__init__(num_classes, label, prediction, ignore_index=ignore_index, prefix=prefix)
        measures = [iou_metrics] if isinstance(iou_metrics, str) else iou_metrics
        self._columns = [*dict.fromkeys(name for kind in measures for name in _COLUMNS[kind])]

    @property
    def names(self) -> tuple[str, ...]:
        """`aAcc`, and the means of the values for each class."""
        return ("aAcc", *(f"m{name}" for name in self._columns))

    def compute(self, state: Confusion) -> dict[str, float]:
        """Return the fractions.

        NaN where no pixel was counted, and with labels out of range.
        """
        # Labels out of range were counted as class 0: the numbers would look valid and be wrong.
        if state.has_invalid:
            return dict.fromkeys(self.names, float("nan"))
        matrix = state.counts.value()
        correct = np.diagonal(matrix)
        # The last column holds predictions outside of the classes, which count as errors of their
        # true class only.
        true = matrix.sum(axis=1)
        predicted = matrix[:, :-1].sum(axis=0)
        recall = divide(correct, true, np.nan)
        precision = divide(correct, predicted, np.nan)
        values = {
            "IoU": divide(correct, true + predicted - correct, np.nan),
            "Acc": recall,
            "Dice": divide(2 * correct, true + predicted, np.nan),
            "Fscore": divide(2 * precision * recall, precision + recall, np.nan),
            "Precision": precision,
            "Recall": recall,
        }
        classes = self.dataset_meta.get("classes", ())
        names = map(str, classes if len(classes) == len(true) else range(len(true)))
        columns = [[f"{x:.4f}" for x in values[name]] for name in self._columns]
        table = format_table(("class", *self._columns), zip(names, *columns, strict=True))
        current_logger().info("\n" + table)
        all_pixels = float(divide(correct.sum(), true.sum(), np.nan))
        return {"aAcc": all_pixels} | {f"m{name}": _nanmean(values[name]) for name in self._columns}


def _nanmean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN, without NumPy's warning if there are none."""
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if valid.size else float("nan")
