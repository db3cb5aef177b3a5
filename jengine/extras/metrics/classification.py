"""Classification metrics from one confusion matrix, and the calibration error."""

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import ArrayLike

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import PairMetric, Predictions, Sum, element_mask
from jengine.model.autocast import at_least_float32
from jengine.model.labels import require_class_indices
from jengine.model.selection import Selector, describe_array

Average = Literal["micro", "macro", "weighted", "binary", "none"]


class Counts(NamedTuple):
    """Exact counts up to 2**64: a run over large images passes the 2**31 of an int32."""

    low: jax.Array  # uint32[...], low words
    high: jax.Array  # uint32[...], high words

    @classmethod
    def zero(cls, *shape: int) -> "Counts":
        """Return zero counts."""
        return cls(jnp.zeros(shape, jnp.uint32), jnp.zeros(shape, jnp.uint32))

    def add(self, index: tuple[jax.Array, ...], is_counted: jax.Array) -> "Counts":
        """Return the counts with one more at `index`, int[N] for each axis, where `is_counted`,
        bool[N]. Pure.
        """
        # A batch has fewer than 2**32 examples, so its own counts cannot wrap.
        added = jnp.zeros_like(self.low).at[index].add(is_counted.astype(jnp.uint32), mode="drop")
        low = self.low + added
        # a carry: the low word has wrapped around
        return Counts(low, self.high + (low < added).astype(jnp.uint32))

    def value(self) -> np.ndarray:
        """Return the counts as float64[...], on the host."""
        return np.asarray(self.low, np.float64) + np.asarray(self.high, np.float64) * 2.0**32


class Confusion(NamedTuple):
    """Counts of decisions, and whether they are valid."""

    # [C, C + 1] by true and predicted class, the last column for predictions that are no class
    counts: Counts
    has_invalid: jax.Array  # bool[], whether a label was out of range


@METRICS.register_module()
class ConfusionMatrix(PairMetric):
    """Number of examples by true class (row) and predicted class (column).

    Counts are exact integers on the device. Padding and labels with `ignore_index` do not count.
    Another label out of range makes the result NaN; in a run it is an error. Scores that are NaN
    predict no class, so the example is in no column.

    >>> metric = ConfusionMatrix(num_classes=2)
    >>> state = metric.update(metric.init(), jnp.array([0, 1, 1]), {"label": jnp.array([0, 0, 1])})
    >>> metric.compute(state)["confusion_matrix"].tolist()
    [[1.0, 1.0], [0.0, 1.0]]

    Args:
      num_classes: number of classes; by default as many as the dataset's metainfo has `classes`.
      label: name, index or dotted path of the batch entry with the true classes, int[B, ...].
      prediction: the prediction entry with logits float[B, ..., C], classes int[B, ...], or, with a
        `threshold`, scores float[B, ...]; None if the predictions are an array.
      normalize: divide by the row total ('true'), the column total ('pred'), or the grand total
        ('all').
      threshold: scores above it are class 1, for two classes.
      ignore_index: label that marks examples to leave out; None for no such label.
      prefix: prefix for result names, none by default.
    """

    def __init__(
        self,
        num_classes: Count | None = None,
        label: Selector = "label",
        prediction: Selector | None = None,
        normalize: Literal["true", "pred", "all"] | None = None,
        threshold: float | None = None,
        ignore_index: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(label, prediction, prefix)
        if num_classes is not None and num_classes < 2:
            raise ConfigError(
                f"{type(self).__name__}: `num_classes` must be at least 2, got {num_classes}"
            )
        self.num_classes = num_classes
        self.normalize = normalize
        self.threshold = threshold
        self.ignore_index = ignore_index

    @property
    def names(self) -> tuple[str, ...]:
        """The name `confusion_matrix`."""
        return ("confusion_matrix",)

    def count_classes(self) -> int:
        """Return the number of classes.

        ConfigError if neither the argument nor the metainfo says it.
        """
        num_classes = self.num_classes or len(self.dataset_meta.get("classes", ()))
        if not num_classes:
            raise ConfigError(
                f"{type(self).__name__}: `num_classes` must be given unless the dataset's "
                "metainfo has 'classes', got None"
            )
        return num_classes

    def init(self) -> Confusion:
        """Return empty counts."""
        return Confusion(
            Counts.zero(self.count_classes(), self.count_classes() + 1), jnp.zeros((), bool)
        )

    def update(self, state: Confusion, predictions: Predictions, batch: Batch) -> Confusion:
        """Return the counts with a batch added; ValueError for other shapes or dtypes."""
        predictions, labels = self.select(predictions, batch)
        num_classes = self.count_classes()
        require_class_indices(
            labels, num_classes, f"{type(self).__name__}.label", self.ignore_index
        )
        labels = jnp.asarray(labels)
        predicted = self._classes(jnp.asarray(predictions), labels)
        # before the conversion, as 255 is -1 in an int8
        mask = element_mask(batch, labels, self.ignore_index)
        labels = labels.astype(jnp.int32)
        is_invalid = mask & ((labels < 0) | (labels >= num_classes))
        # Such a prediction is wrong: it counts against the recall, but in no class against the
        # precision.
        column = jnp.where((predicted >= 0) & (predicted < num_classes), predicted, num_classes)
        # Any row will do for a label out of range, as the result is NaN, and for what does not
        # count.
        counts = state.counts.add(
            (jnp.where(mask & ~is_invalid, labels, 0).ravel(), column.ravel()), mask.ravel()
        )
        return Confusion(counts, state.has_invalid | is_invalid.any())

    def compute(self, state: Confusion) -> dict[str, Any]:
        """Return the matrix, float64[C, C]."""
        matrix = (
            state.counts.value()[:, :-1]
            if not state.has_invalid
            else np.full([self.count_classes()] * 2, np.nan)
        )
        totals = {
            "true": matrix.sum(axis=1, keepdims=True),
            "pred": matrix.sum(axis=0),
            "all": matrix.sum(),
        }
        return {
            "confusion_matrix": matrix
            if self.normalize is None
            else divide(matrix, totals[self.normalize], 0.0)
        }

    def _classes(self, predictions: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the predicted classes, int[B, ...]."""
        name = type(self).__name__
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ValueError(f"{name}: labels must be integers, got {labels.dtype}")
        is_integer = jnp.issubdtype(predictions.dtype, jnp.integer)
        # Integers of this shape are classes of pixels whose last axis happens to have the size C.
        if predictions.shape == (*labels.shape, self.count_classes()) and not is_integer:
            return predict_class(predictions)
        if predictions.shape == labels.shape and is_integer:
            return predictions.astype(jnp.int32)
        if predictions.shape == labels.shape and self.threshold is not None:
            no_class = self.count_classes()
            return jnp.where(jnp.isnan(predictions), no_class, predictions > self.threshold).astype(
                jnp.int32
            )
        raise ValueError(
            f"{name}: predictions must be logits float[B, ..., {self.count_classes()}] or class "
            f"indices int[B, ...] for labels {describe_array(labels)}, or scores if `threshold` "
            f"is set, got {describe_array(predictions)}"
        )


@METRICS.register_module()
class PrecisionRecallF1(ConfusionMatrix):
    """Precision, recall and F1 score, averaged over classes.

    The results are `precision_macro`, `recall_macro`, `f1_macro`, and the same for each further
    average. As in scikit-learn, a class that occurs in neither labels nor predictions does not
    count in the mean, and 0 / 0 is 0. Scores that are NaN predict no class, so a broken model has
    no precision and no recall.

    >>> metric = PrecisionRecallF1(num_classes=2, average=("macro", "binary"))
    >>> state = metric.update(metric.init(), jnp.array([0, 1, 1]), {"label": jnp.array([0, 0, 1])})
    >>> metric.compute(state)["recall_macro"], metric.compute(state)["precision_binary"]
    (0.75, 0.5)

    Args:
      num_classes, label, prefix: see `ConfusionMatrix`.
      average: 'micro' (over all decisions), 'macro' (mean over classes), 'weighted' (by the
        examples in each class), 'binary' (class 1 alone), 'none' (an array by class), or several of
        these.
      items: which of 'precision', 'recall' and 'f1'.
      prediction: the prediction entry, as for `ConfusionMatrix`.
      multilabel: labels are bool or int[B, C], 1 for each class that is present; the predictions
        are scores float[B, C], compared with `threshold`.
      threshold: see `ConfusionMatrix`; 0.5 for probabilities, 0 for logits.
      ignore_index: label that marks examples to leave out, or single decisions with `multilabel`.
    """

    def __init__(
        self,
        num_classes: Count | None = None,
        average: Average | Sequence[Average] = "macro",
        items: Sequence[Literal["precision", "recall", "f1"]] = ("precision", "recall", "f1"),
        label: Selector = "label",
        prediction: Selector | None = None,
        multilabel: bool = False,
        threshold: float | None = None,
        ignore_index: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(num_classes, label, prediction, None, threshold, ignore_index, prefix)
        # Neither 0 nor 0.5 is a safe default: predictions may be logits or probabilities.
        if multilabel and threshold is None:
            raise ConfigError(
                f"{type(self).__name__}: `threshold` must be a number with multilabel=True, got "
                "None"
            )
        self.average: tuple[Average, ...] = (
            (average,) if isinstance(average, str) else tuple(average)
        )
        self._items = tuple(items)
        self.multilabel = multilabel

    @property
    def names(self) -> tuple[str, ...]:
        """The names `precision_macro` ..."""
        return tuple(f"{item}_{average}" for average in self.average for item in self._items)

    def init(self) -> Confusion:
        """Return empty counts; for `multilabel` by class, truth and decision."""
        if not self.multilabel:
            return super().init()
        return Confusion(Counts.zero(self.count_classes(), 2, 2), jnp.zeros((), bool))

    def update(self, state: Confusion, predictions: Predictions, batch: Batch) -> Confusion:
        """Return the counts with a batch added."""
        if not self.multilabel:
            return super().update(state, predictions, batch)
        scores, labels = (jnp.asarray(array) for array in self.select(predictions, batch))
        if scores.shape != labels.shape or labels.shape[1:] != (self.count_classes(),):
            raise ValueError(
                "PrecisionRecallF1: predictions and labels must have the shape [B, "
                f"{self.count_classes()}], got "
                f"{describe_array(scores)} and {describe_array(labels)}"
            )
        mask = element_mask(batch, labels, self.ignore_index)
        classes = jnp.broadcast_to(jnp.arange(self.count_classes()), labels.shape)
        # One 2 x 2 table per class: several classes may be present, so there is no single true one.
        index = (
            classes,
            (labels > 0).astype(jnp.int32),
            (scores > (self.threshold or 0.0)).astype(jnp.int32),
        )
        counts = state.counts.add(tuple(axis.ravel() for axis in index), mask.ravel())
        return Confusion(counts, state.has_invalid | (mask & (labels != 0) & (labels != 1)).any())

    def compute(self, state: Confusion) -> dict[str, Any]:
        """Return the scores; NaN without examples, and with labels out of range."""
        counts = state.counts.value()
        if self.multilabel:
            # [class, truth, decision]
            correct = counts[:, 1, 1]
            predicted = counts[:, :, 1].sum(axis=1)
            true = counts[:, 1].sum(axis=1)
        else:
            correct = np.diagonal(counts)
            true = counts.sum(axis=1)
            predicted = counts[:, :-1].sum(axis=0)
        totals = np.stack([correct, predicted, true])
        empty = np.nan if not counts.sum() else 0.0
        results = {}
        for average in self.average:
            selected = {"micro": totals.sum(axis=1), "binary": totals[:, 1]}.get(average, totals)
            scores = self._scores(selected, empty)
            # scikit-learn averages over the classes that occur; with several labels each is a class
            # of its own
            occurs = (predicted + true > 0) if not self.multilabel else np.ones_like(true, bool)
            for item in self._items:
                score: Any = scores[item]
                if average == "macro":
                    score = score[occurs].mean() if occurs.any() else np.nan
                elif average == "weighted":
                    score = divide((score * true).sum(), true.sum(), empty)
                results[f"{item}_{average}"] = score if average == "none" else float(score)
        return dict.fromkeys(results, np.nan) if state.has_invalid else results

    @staticmethod
    def _scores(totals: np.ndarray, empty: float) -> dict[str, np.ndarray]:
        correct, predicted, true = totals
        return {
            "precision": divide(correct, predicted, empty),
            "recall": divide(correct, true, empty),
            # The harmonic mean of precision and recall, without their own divisions by zero.
            "f1": divide(2 * correct, predicted + true, empty),
        }


@METRICS.register_module()
class CalibrationError(PairMetric):
    """Expected and maximum calibration error (Guo et al., 2017, arXiv:1706.04599), `ece` and `mce`.

    Examples are divided by confidence, the probability of the predicted class, into equally wide
    bins. In each bin the mean confidence is compared with the accuracy. A prediction with NaN
    counts as wrong with confidence 1, so that a broken model is never the best calibrated one.

    >>> metric = CalibrationError(from_logits=False)
    >>> probabilities = jnp.array([[0.75, 0.25], [0.25, 0.75]])
    >>> metric.compute(metric.update(metric.init(), probabilities, {"label": jnp.array([0, 1])}))[
    ...     "ece"
    ... ]
    0.25

    Args:
      num_bins: number of bins.
      label: the batch entry with the true classes, int[B, ...].
      prediction: the prediction entry with logits or probabilities float[B, ..., C]; None if it is
        an array.
      from_logits: apply a softmax to the predictions.
      ignore_index: label that marks examples to leave out; None for no such label.
      prefix: prefix for result names, none by default.
    """

    names = ("ece", "mce")

    def __init__(
        self,
        num_bins: Count = 15,
        label: Selector = "label",
        prediction: Selector | None = None,
        from_logits: bool = True,
        ignore_index: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(label, prediction, prefix)
        self.num_bins = num_bins
        self.from_logits = from_logits
        self.ignore_index = ignore_index

    def init(self) -> tuple[Counts, Sum]:
        """Return the counts by bin and correctness, [bins, 2], and the summed confidences,
        [bins].
        """
        return Counts.zero(self.num_bins, 2), Sum.zero(self.num_bins)

    def update(
        self, state: tuple[Counts, Sum], predictions: Predictions, batch: Batch
    ) -> tuple[Counts, Sum]:
        """Return the state with a batch added."""
        logits, labels = self.select(predictions, batch)
        if logits.shape[:-1] != labels.shape or not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ValueError(
                "CalibrationError: predictions must be float[B, ..., C] and labels int[B, ...], "
                f"got {describe_array(logits)} and {describe_array(labels)}"
            )
        num_classes = logits.shape[-1]
        require_class_indices(labels, num_classes, "CalibrationError.label", self.ignore_index)
        labels = jnp.asarray(labels)
        logits = at_least_float32(jnp.asarray(logits))
        mask = element_mask(batch, labels, self.ignore_index)
        is_valid = (labels >= 0) & (labels < num_classes)
        probabilities = jax.nn.softmax(logits) if self.from_logits else logits
        predicted = predict_class(probabilities)
        confidence = jnp.where(predicted < num_classes, probabilities.max(axis=-1), 1.0)
        confidence = jnp.where(mask, confidence, 0.0)
        is_correct = (predicted == labels).astype(jnp.int32)
        # bins are (low, high], so that a confidence of 1 is in the last one
        bins = jnp.clip(
            jnp.ceil(confidence * self.num_bins).astype(jnp.int32) - 1, 0, self.num_bins - 1
        )
        counts, sums = state
        # NaN in a sum makes both errors NaN; `has_invalid` would be one more state.
        confidence = jnp.where(mask & ~is_valid, jnp.nan, confidence)
        added = jnp.zeros(self.num_bins, sums.total.dtype).at[bins.ravel()].add(confidence.ravel())
        return counts.add((bins.ravel(), is_correct.ravel()), mask.ravel()), sums.add(added)

    def compute(self, state: tuple[Counts, Sum]) -> dict[str, float]:
        """Return both errors; NaN without examples, and with labels out of range."""
        counts = state[0].value()
        confidence = state[1].value()
        count = counts.sum(axis=1)
        gaps = abs(counts[:, 1] - confidence)  # accuracy minus mean confidence, times the count
        return {
            "ece": float(divide(gaps.sum(), count.sum(), np.nan)),
            "mce": float(divide(gaps, count, 0.0).max()) if count.any() else float("nan"),
        }


def divide(numerator: ArrayLike, denominator: ArrayLike, otherwise: float) -> np.ndarray:
    """Divide on the host, with a value for a zero denominator."""
    parts, totals = np.broadcast_arrays(numerator, denominator)
    return np.divide(parts, totals, out=np.full(parts.shape, otherwise), where=totals > 0)


def predict_class(scores: jax.Array) -> jax.Array:
    """Return the class with the highest score, int32[...] from float[..., C].

    Where a score is NaN it is C, which is no class: NaN would count as the highest score.

    >>> predict_class(jnp.array([[0.1, 0.9], [jnp.nan, 0.5]])).tolist()
    [1, 2]
    """
    return jnp.where(
        jnp.isnan(scores).any(axis=-1), scores.shape[-1], scores.argmax(axis=-1)
    ).astype(jnp.int32)
