"""Top-k accuracy."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.errors import closest
from jengine.evaluation.metric import BaseMetric, real_rows
from jengine.registry import METRICS


@METRICS.register_module()
class Accuracy(BaseMetric):
    """The fraction, 0 to 1, of examples whose true class is among the k that the model ranks highest.

    Counts are integers, so the result is exact and the same for any batch size. Equal logits rank by class number, as
    `argmax` does; a row with a NaN, or a label that is no class, counts as wrong.

    Args:
      topk: one k or several; the results are `accuracy/top1`, `accuracy/top5` ...
      label: the batch's entry with the true classes, int[B].
      prediction: the entry of the predictions to use, where they are a dict. Logits float[B, C], or class numbers
        int[B] for top-1.
      prefix: stands before the names of the results, 'accuracy' by default.

    Raises:
      ValueError: a k below 1, none or the same twice.
    """

    default_prefix = "accuracy"

    def __init__(
        self,
        topk: int | Sequence[int] = (1,),
        label: str = "label",
        prediction: str | None = None,
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        self.topk = (topk,) if isinstance(topk, int) else tuple(topk)
        if not self.topk or min(self.topk) < 1 or len(set(self.topk)) < len(self.topk):
            raise ValueError(f"topk is one or more different numbers from 1 on, found {topk!r}")
        self.label = label
        self.prediction = prediction

    @property
    def names(self) -> tuple[str, ...]:
        """`top1` and so on."""
        return tuple(f"top{k}" for k in self.topk)

    def init(self) -> dict[str, jax.Array]:
        """Counts: `correct` int32[len(topk)] and `count` int32[]."""
        return {"correct": jnp.zeros(len(self.topk), jnp.int32), "count": jnp.zeros((), jnp.int32)}

    def update(self, state: dict[str, jax.Array], predictions: Any, batch: Any) -> dict[str, jax.Array]:
        """Counts the real rows and, for each k, those that are right.

        Raises:
          KeyError: no such entry in batch or predictions. ValueError: shapes that do not belong together.
        """
        labels = jnp.asarray(_entry("the batch", batch, self.label, "label"))
        if self.prediction is not None or isinstance(predictions, Mapping):
            predictions = _entry("the predictions", predictions, self.prediction, "prediction")
        rank = self._rank(jnp.asarray(predictions), labels)
        real = real_rows(batch)
        right = (rank[:, None] < jnp.asarray(self.topk)) & real[:, None]
        return {
            "correct": state["correct"] + right.sum(axis=0, dtype=jnp.int32),
            "count": state["count"] + real.sum(dtype=jnp.int32),
        }

    def compute(self, state: dict[str, np.ndarray]) -> dict[str, float]:
        """`top1` and so on: the fraction of right rows."""
        count = int(state["count"])
        return {
            name: int(correct) / count if count else float("nan")
            for name, correct in zip(self.names, state["correct"], strict=True)
        }

    def _rank(self, predictions: jax.Array, labels: jax.Array) -> jax.Array:
        """How many classes the model ranks before the true one: int32[B]; C or more where there is none."""
        ids = predictions.ndim == 1 and jnp.issubdtype(predictions.dtype, jnp.integer)
        if labels.ndim != 1 or predictions.shape[:1] != labels.shape or not (ids or predictions.ndim == 2):
            raise ValueError(
                "Accuracy takes logits float[B, C] or class numbers int[B] and labels int[B]; found predictions "
                f"{predictions.dtype}{list(predictions.shape)} and labels {labels.dtype}{list(labels.shape)}"
            )
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            raise ValueError(f"labels are integers, the class numbers; found {labels.dtype}")
        most = max(self.topk)
        if ids:
            if most > 1:
                raise ValueError(f"top-{most} needs logits float[B, C]; found class numbers int[B]")
            return (predictions != labels).astype(jnp.int32)
        classes = predictions.shape[1]
        if most > classes:
            raise ValueError(f"top-{most} of {classes} classes is always right; found topk {self.topk}")
        is_label = jnp.arange(classes) == labels[:, None]
        own = jnp.max(jnp.where(is_label, predictions, -jnp.inf), axis=1, keepdims=True)
        before = (predictions > own) | ((predictions == own) & (jnp.arange(classes) < labels[:, None]))
        valid = is_label.any(axis=1) & ~jnp.isnan(predictions).any(axis=1)
        return jnp.where(valid, before.sum(axis=1, dtype=jnp.int32), classes)


def _entry(owner: str, tree: Any, key: str | None, argument: str) -> Any:
    """`tree[key]`, with an error that says what there is instead."""
    names = sorted(map(str, tree)) if isinstance(tree, Mapping) else []
    if key is None or not isinstance(tree, Mapping) or key not in tree:
        problem = f"are a dict, say which entry with {argument}=" if key is None else f"has no entry {key!r}"
        raise KeyError(f"Accuracy: {owner} {problem}{closest(key or '', names)}")
    return tree[key]
