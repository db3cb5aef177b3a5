"""Metrics from the order of the scores over the whole data set, on the host."""

from typing import Any, Literal

import numpy as np

from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import HostMetric, PairMetric, Predictions
from jengine.model.labels import require_class_indices
from jengine.model.selection import Selector, describe_array


class RankingMetric(PairMetric, HostMetric):
    """Base class for metrics of scores and binary labels, one class against the rest; see `AUROC`.

    All scores and labels are kept on the host, because a ranking is not a sum; the results are
    exact, with ties. An example whose scores are NaN is predicted to be in no class: if it is
    positive it is never found.

    Args:
      average: mean over classes: 'macro', 'weighted' by their numbers of examples, or 'none' for an
        array by class.
      label: the batch entry with labels, int[B]; or int[B, C] for several labels, 1 for each that
        is present.
      prediction: the prediction entry with scores, float[B] for class 1 of two, or float[B, C];
        None if it is an array.
      from_logits: apply a softmax to the scores if there are several classes, of which one is true.
      ignore_index: label that does not count; None for no such label.
      prefix: prefix for the result name, none by default.
    """

    names: tuple[str, ...]  # of the one result

    def __init__(
        self,
        average: Literal["macro", "weighted", "none"] = "macro",
        label: Selector = "label",
        prediction: Selector | None = None,
        from_logits: bool = True,
        ignore_index: int | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(label, prediction, prefix)
        self.average = average
        self.from_logits = from_logits
        self.ignore_index = ignore_index

    def score(self, is_positive: np.ndarray, scores: np.ndarray) -> float:
        """Return the value for one class, from bool[N] and float64[N]; NaN where it is not defined.

        A score may be NaN, which ranks below all others.
        """
        raise NotImplementedError

    def process(self, data_batch: Batch, data_samples: Predictions) -> None:
        """Keep the scores and labels of a batch."""
        scores, labels = (np.asarray(array) for array in self._select(data_samples, data_batch))
        # bfloat16 is not sent
        self.results.append((scores.astype(np.float32), labels.astype(np.int32)))

    def update(self, state: Any, predictions: Predictions, batch: Batch) -> Any:
        """Return the state unchanged; what does not fit is an error while the step is traced."""
        scores, labels = self._select(predictions, batch)
        if labels.ndim < scores.ndim:
            require_class_indices(
                labels, scores.shape[1], f"{type(self).__name__}.label", self.ignore_index
            )
        return state

    def _select(self, predictions: Predictions, batch: Batch) -> tuple[Any, Any]:
        scores, labels = self.select(predictions, batch)
        if labels.shape not in (scores.shape, scores.shape[:-1]) or scores.ndim not in (1, 2):
            raise ValueError(
                f"{type(self).__name__}: predictions must be scores float[B] or float[B, C], and "
                f"labels int[B], or int[B, C] for several labels, got {describe_array(scores)} "
                f"and {describe_array(labels)}"
            )
        return scores, labels

    def compute_metrics(self, results: list[Any]) -> dict[str, Any]:
        """Return the value, the mean over classes, or an array by class."""
        (name,) = self.names
        scores, labels = (np.concatenate(arrays) for arrays in zip(*results, strict=True))
        # After the gather, which sends half the bytes of float64.
        scores = scores.astype(np.float64)
        if labels.ndim < scores.ndim:  # one class of several
            is_counted = (
                labels != self.ignore_index if self.ignore_index is not None else slice(None)
            )
            scores = scores[is_counted]
            labels = labels[is_counted]
            if self.from_logits:  # the order within a class depends on the other classes' logits
                with np.errstate(invalid="ignore"):  # an infinite logit gives NaN
                    scores = np.exp(scores - scores.max(axis=1, keepdims=True))
                    scores /= scores.sum(axis=1, keepdims=True)
            scores[np.isnan(scores).any(axis=1)] = np.nan  # no class, for none of the classes
            if labels.size and not 0 <= labels.min() <= labels.max() < scores.shape[1]:
                return {name: float("nan")}
            if scores.shape[1] == 2:
                # Two classes are one ranking; the one by class 0 is its mirror image.
                scores = scores[:, 1]
            else:
                labels = labels[:, None] == np.arange(scores.shape[1])
        if labels.ndim == 1:
            return {name: self._score_class(labels, scores)}
        values = np.array(
            [self._score_class(*column) for column in zip(labels.T, scores.T, strict=True)]
        )
        if self.average == "none":
            return {name: values}
        weights = (labels == 1).sum(axis=0) if self.average == "weighted" else np.ones(len(values))
        defined = ~np.isnan(values)
        total = weights[defined].sum()
        return {name: float((values * weights)[defined].sum() / total) if total else float("nan")}

    def _score_class(self, labels: np.ndarray, scores: np.ndarray) -> float:
        if self.ignore_index is not None:
            scores = scores[labels != self.ignore_index]
            labels = labels[labels != self.ignore_index]
        return self.score(labels == 1, scores) if np.isin(labels, (0, 1)).all() else float("nan")


@METRICS.register_module()
class AUROC(RankingMetric):
    """Area under the ROC curve, `auroc`: binary, or the mean over classes, one against the rest.

    A class without examples, or without others, does not count in the mean. Arguments as for
    `RankingMetric`.

    >>> metric = AUROC()
    >>> metric.process({"label": np.array([0, 0, 1, 1])}, np.array([0.1, 0.4, 0.35, 0.8]))
    >>> metric.collect(None)
    {'auroc': 0.75}
    """

    names = ("auroc",)

    def score(self, is_positive: np.ndarray, scores: np.ndarray) -> float:
        """Return the probability that a positive example scores above a negative one, where a
        tie is a half.
        """
        # NaN is below all scores, and a positive example with NaN is below a negative one too: it
        # is never found.
        levels = np.where(is_positive, 0, 1)
        is_found = ~np.isnan(scores)
        levels[is_found] = 2 + np.unique(scores[is_found], return_inverse=True)[1]
        _, inverse, counts = np.unique(levels, return_inverse=True, return_counts=True)
        ranks = (np.cumsum(counts) - (counts - 1) / 2)[inverse]  # from 1; the mean rank for ties
        positive = is_positive.sum()
        negative = (~is_positive).sum()
        if not positive or not negative:
            return float("nan")
        # The Mann-Whitney U statistic, divided by the number of pairs.
        return float(
            (ranks[is_positive].sum() - positive * (positive + 1) / 2) / (positive * negative)
        )


@METRICS.register_module()
class AveragePrecision(RankingMetric):
    """Average precision, `average_precision`: binary, or the mean over classes (mAP), one against
    the rest.

    As in scikit-learn, the precision is not interpolated. A class without examples does not count
    in the mean. Arguments as for `RankingMetric`.

    >>> metric = AveragePrecision()
    >>> metric.process({"label": np.array([0, 0, 1, 1])}, np.array([0.1, 0.4, 0.3, 0.8]))
    >>> round(metric.collect(None)["average_precision"], 4)
    0.8333
    """

    names = ("average_precision",)

    def score(self, is_positive: np.ndarray, scores: np.ndarray) -> float:
        """Return the mean precision over the positive examples, at the threshold at which each
        is found.
        """
        if not is_positive.any():
            return float("nan")
        is_found = ~np.isnan(scores)
        # Descending, and equal scores together: a threshold cannot separate ties.
        _, inverse, found = np.unique(-scores[is_found], return_inverse=True, return_counts=True)
        hits = np.bincount(inverse, weights=is_positive[is_found], minlength=len(found))
        return float((hits * np.cumsum(hits) / np.cumsum(found)).sum() / is_positive.sum())
