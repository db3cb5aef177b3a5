"""The mean of a loss over the evaluation data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.evaluation.metric import BaseMetric, Mean, real_rows
from jengine.registry import METRICS, MODELS


@METRICS.register_module()
class MeanLoss(BaseMetric):
    """The mean of a loss over all examples, exact for any batch size.

    The results are the loss, `loss`, and where it is a dict its parts under their names; `loss` is then the sum of the
    parts whose name contains 'loss', as in training.

    Args:
      loss: function (predictions, batch) -> the loss of each example, float[B, ...] (the axes after the first are
        averaged), or (sum, weight) of the batch, or a scalar, the mean over the batch's real rows; or a dict of those
        with the names `parts`. Or a config of such a function, registered among the models.
      parts: the names of the parts, where `loss` returns a dict: the state exists before the first batch is seen.
      prefix: stands before the names of the results; none by default.

    Raises:
      TypeError: the loss is not callable. ValueError: a part called `loss`, or none that counts for the total.
    """

    def __init__(
        self, loss: Callable[[Any, Any], Any] | Mapping[str, Any], parts: Sequence[str] = (), prefix: str | None = None
    ) -> None:
        super().__init__(prefix)
        self.loss: Callable[[Any, Any], Any] = MODELS.build(loss) if hasattr(loss, "items") else loss
        if not callable(self.loss):
            raise TypeError(f"loss is a function (predictions, batch) -> the loss of each example, found {loss!r}")
        if "loss" in parts:
            raise ValueError("'loss' is the name of the total; give that part another name")
        if parts and not any("loss" in part for part in parts):
            raise ValueError(f"the total is the sum of the parts whose name contains 'loss'; found {sorted(parts)}")
        self.parts = tuple(parts)

    @property
    def names(self) -> tuple[str, ...]:
        """`loss`, then the parts."""
        return ("loss", *self.parts)

    def init(self) -> dict[str, Mean]:
        """A mean of nothing for each part, or for the one loss."""
        return {name: Mean.zero() for name in self.parts or ("loss",)}

    def update(self, state: dict[str, Mean], predictions: Any, batch: Any) -> dict[str, Mean]:
        """Adds the losses of the real rows.

        Raises:
          ValueError: the loss returned other parts than were announced, or a shape without the batch's axis.
        """
        losses = self.loss(predictions, batch)
        if not isinstance(losses, Mapping):
            losses = {"loss": losses}
        if set(losses) != set(state):
            found, expected = sorted(losses), sorted(state)
            hint = "" if self.parts else f"; say parts={found}"
            raise ValueError(f"the loss returned the parts {found}, expected {expected}{hint}")
        return {name: mean.add(*_sum_and_weight(losses[name], batch)) for name, mean in state.items()}

    def compute(self, state: dict[str, Mean]) -> dict[str, float]:
        """The mean of each part, and their total first."""
        if not self.parts:
            return {"loss": state["loss"].value()}
        parts = {name: state[name].value() for name in self.parts}
        return {"loss": sum(value for name, value in parts.items() if "loss" in name), **parts}


def _sum_and_weight(loss: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
    """What a batch adds: the sum over its real rows, float32[], and their number or weight."""
    if isinstance(loss, tuple):
        total, weight = loss
        return jnp.asarray(total), jnp.asarray(weight)
    loss = jnp.asarray(loss)
    real = real_rows(batch)
    rows = real.shape[0]
    if loss.ndim == 0:
        count = real.sum()
        # A batch of padding alone has no mean; whatever stands there must not spoil the others.
        return jnp.where(count > 0, loss.astype(jnp.float32) * count, 0.0), count
    if loss.shape[0] != rows:
        raise ValueError(f"a loss has one entry for each of the {rows} rows of the batch, or none; found {loss.shape}")
    per_row = loss.astype(jnp.float32).reshape(rows, -1).mean(axis=1)
    return jnp.where(real, per_row, 0.0).sum(), real.sum()
