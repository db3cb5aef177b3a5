"""Semantic segmentation metrics from one confusion matrix."""

import numpy as np

from jengine.config.annotations import Count
from jengine.config.registry import METRICS
from jengine.extras.metrics.classification import Confusion, ConfusionMatrix, divide
from jengine.logging.console import current_logger
from jengine.logging.tables import format_table
from jengine.model.selection import Selector


@METRICS.register_module()
class IoUMetric(ConfusionMatrix):
    """Pixel accuracy `aAcc`, mean intersection over union `mIoU` and mean class accuracy `mAcc`, as
    fractions.

    Counts are integers on the device, so that results do not depend on the batch size. Padded
    examples and pixels with `ignore_index` are ignored. Another label out of range makes all
    results NaN; in a run it is an error. `mIoU` leaves out classes that occur in neither labels nor
    predictions, `mAcc` classes that do not occur in the labels. A table with one row per class is
    logged.

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
    """

    def __init__(
        self,
        num_classes: Count | None = None,
        ignore_index: int = 255,
        label: Selector = "label",
        prediction: Selector | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(num_classes, label, prediction, ignore_index=ignore_index, prefix=prefix)

    @property
    def names(self) -> tuple[str, ...]:
        """`aAcc`, `mIoU`, `mAcc`."""
        return ("aAcc", "mIoU", "mAcc")

    def compute(self, state: Confusion) -> dict[str, float]:
        """Return the three fractions.

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
        iou = divide(correct, true + predicted - correct, np.nan)
        accuracy = divide(correct, true, np.nan)
        classes = self.dataset_meta.get("classes", ())
        names = classes if len(classes) == len(iou) else range(len(iou))
        rows = [
            (str(name), f"{i:.4f}", f"{a:.4f}")
            for name, i, a in zip(names, iou, accuracy, strict=True)
        ]
        current_logger().info("\n" + format_table(("class", "IoU", "Acc"), rows))
        all_pixels = float(divide(correct.sum(), true.sum(), np.nan))
        return {"aAcc": all_pixels, "mIoU": _nanmean(iou), "mAcc": _nanmean(accuracy)}


def _nanmean(values: np.ndarray) -> float:
    """Return the mean of the values that are not NaN, without NumPy's warning if there are none."""
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if valid.size else float("nan")
