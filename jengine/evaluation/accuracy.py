"""Top-k accuracy."""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import ConfigError
from jengine.config.registry import METRICS
from jengine.data.host_entries import Batch
from jengine.evaluation.metric import PairMetric, Predictions, element_mask
from jengine.model.labels import require_class_indices
from jengine.model.selection import Selector, describe_array


@METRICS.register_module()
class Accuracy(PairMetric):
    """Fraction, 0 to 1, of labels that are among the k classes with the highest logits.

    Counts are integers, so the result is exact for any batch size. Equal logits are ranked by class
    index, as in `argmax`. A label with a NaN logit counts as wrong. A label outside [0, C) that is
    not `ignore_index` makes the result NaN; in a run it is an error.

    Args:
      topk: one k or several; the results are `accuracy/top1`, `accuracy/top5` ...
      label: name, index or dotted path of the batch entry with the true classes, int[B], or one for
        each token or pixel, int[B, ...].
      prediction: the prediction entry with logits float[B, ..., C], or class indices int[B, ...]
        for top-1; None if the predictions are an array.
      prefix: prefix for result names, 'accuracy' by default.
      ignore_index: the label to leave out; None for no such label.

    Examples:
      >>> metric = Accuracy(topk=(1, 2))
      >>> logits = jnp.array([[0.1, 0.9, 0.0], [0.5, 0.2, 0.3]])
      >>> state = metric.update(metric.init(), logits, {"label": jnp.array([1, 2])})
      >>> metric.compute(state)
      {'top1': 0.5, 'top2': 1.0}
    """

    default_prefix = "accuracy"

    def __init__(
        self,
        topk: Count | Sequence[Count] = (1,),
        label: Selector = "label",
        prediction: Selector | None = None,
        prefix: str | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(label, prediction, prefix)
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or len(set(self.topk)) < len(self.topk):
            raise ConfigError(f"`Accuracy.topk` must be distinct integers, got {topk!r}")
        self.ignore_index = ignore_index

    @property
    def names(self) -> tuple[str, ...]:
        """The names `top1`, `top5` ..."""
        return tuple(map("top{}".format, self.topk))

    def init(self) -> dict[str, jax.Array]:
        """Return the initial counts: `correct` int32[len(topk)], `count` int32[] and `invalid`
        (labels) int32[].
        """
        shapes = {"correct": (len(self.topk),), "count": (), "invalid": ()}
        return {name: jnp.zeros(shape, jnp.int32) for name, shape in shapes.items()}

    def update(
        self, state: dict[str, jax.Array], predictions: Predictions, batch: Batch
    ) -> dict[str, jax.Array]:
        """Return the counts with a batch added.

        KeyError for a missing entry, ValueError for other shapes or dtypes.
        """
        predictions, labels = map(jnp.asarray, pair := self.select(predictions, batch))
        has_logits = predictions.ndim == labels.ndim + 1
        num_classes = predictions.shape[-1] if has_logits else 2**31 - 1
        if has_logits:
            require_class_indices(pair[1], num_classes, "Accuracy.label", self.ignore_index)
        rank = self._rank(predictions, labels)
        labels = labels.astype(jnp.int32)  # -1 does not fit in a uint8
        mask = element_mask(batch, labels, self.ignore_index)
        is_correct = ((rank < k) & mask for k in self.topk)
        is_invalid = mask & ((labels < 0) | (labels >= num_classes))
        return {
            "correct": state["correct"]
            + jnp.stack([hits.sum(dtype=jnp.int32) for hits in is_correct]),
            "count": state["count"] + mask.sum(dtype=jnp.int32),
            "invalid": state["invalid"] + is_invalid.sum(dtype=jnp.int32),
        }

    def compute(self, state: dict[str, np.ndarray]) -> dict[str, float]:
        """Return the fraction of correct labels for each k.

        NaN without labels, and with labels out of range.
        """
        count = 0 if state["invalid"] else int(state["count"])
        pairs = zip(self.names, state["correct"], strict=True)
        return {name: int(correct) / count if count else float("nan") for name, correct in pairs}

    def _rank(self, predictions: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the number of classes ranked above the true one, int32[B, ...].

        C if the label or a logit is invalid.
        """
        has_classes = predictions.shape == labels.shape
        fits = (
            jnp.issubdtype(predictions.dtype, jnp.integer)
            if has_classes
            else (predictions.shape[:-1] == labels.shape)
        )
        if not (labels.ndim and fits and jnp.issubdtype(labels.dtype, jnp.integer)):
            raise ValueError(
                "`Accuracy.label` must fit the predictions: logits float[B, ..., C] or class "
                "indices int[B, ...], and labels int[B, ...], got "
                f"{describe_array(predictions)} and {describe_array(labels)}"
            )
        num_classes = 1 if has_classes else predictions.shape[-1]
        if max(self.topk) > num_classes:
            raise ValueError(
                f"`Accuracy.topk` must be at most {num_classes} for {describe_array(predictions)}, "
                f"got {self.topk}"
            )
        if has_classes:
            return (predictions != labels).astype(jnp.int32)  # rank 0 is the top one
        classes = jnp.arange(num_classes)
        # a mask instead of an index, which would clip invalid labels
        is_label = classes == labels[..., None]
        label_logit = jnp.max(jnp.where(is_label, predictions, -jnp.inf), axis=-1, keepdims=True)
        # Counting is cheaper than a sort, and `jax.lax.top_k` would not say the rank of the label.
        is_above = (predictions > label_logit) | (
            (predictions == label_logit) & (classes < labels[..., None])
        )
        # NaN would have rank 0
        is_valid = is_label.any(axis=-1) & ~jnp.isnan(predictions).any(axis=-1)
        return jnp.where(is_valid, is_above.sum(axis=-1, dtype=jnp.int32), num_classes)
