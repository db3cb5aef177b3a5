"""Mean loss over the evaluation data."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jengine.config.registry import METRICS, MODELS
from jengine.data.host_entries import Batch
from jengine.data.masking import are_whole
from jengine.evaluation.metric import BaseMetric, Mean, Predictions, example_mask
from jengine.model.adapters import to_loss_dict
from jengine.model.autocast import at_least_float32


@METRICS.register_module()
class MeanLoss(BaseMetric):
    """Mean loss over all examples, which does not depend on the batch size.

    The result is `loss`. If the loss is a dict, the entries are further results, and `loss` is the
    sum of those with 'loss' in the name, as in training.

    Args:
      loss: a function `(predictions, batch) -> loss`, or a loss config for `MODELS`. It should
        return a loss for each example, float[B, ...] (averaged over all axes but the first), or
        `(sum, weight)` for the batch, or a scalar, the mean over examples without padding; or a
        dict of these with the keys `parts`.
      parts: the keys if `loss` returns a dict: `init` must know them before the first batch.
      prefix: prefix for result names, none by default.

    Raises:
      TypeError: `loss` is not callable. ValueError: a part is named `loss`, or no part has 'loss'
        in its name.

    Examples:
      >>> metric = MeanLoss(lambda predictions, batch: (predictions - batch["target"]) ** 2)
      >>> state = metric.update(
      ...     metric.init(), jnp.array([1.0, 3.0]), {"target": jnp.array([0.0, 0.0])}
      ... )
      >>> metric.compute(state)
      {'loss': 5.0}
    """

    def __init__(
        self,
        loss: Callable[[Any, Any], Any] | Mapping[str, Any],
        parts: Sequence[str] = (),
        prefix: str | None = None,
    ) -> None:
        super().__init__(prefix)
        self.loss: Callable[[Any, Any], Any] = MODELS.build_function(loss)
        if parts and ("loss" in parts or not any("loss" in part for part in parts)):
            raise ValueError(
                "`MeanLoss.parts` must have names with 'loss', which the total `loss` adds up, and "
                f"not the total itself, got {list(parts)}"
            )
        self.parts = tuple(parts)

    @property
    def names(self) -> tuple[str, ...]:
        """The name `loss`, then the parts."""
        return ("loss", *self.parts)

    def init(self) -> dict[str, Mean]:
        """Return an empty mean for each part, or for `loss`."""
        return {name: Mean.zero() for name in self.parts or ("loss",)}

    def update(
        self, state: dict[str, Mean], predictions: Predictions, batch: Batch
    ) -> dict[str, Mean]:
        """Return the means with a batch added.

        ValueError if the loss has other keys than `parts`, or another axis.
        """
        losses = to_loss_dict(self.loss(predictions, batch))
        if set(losses) != set(state):
            hint = "" if self.parts else f"; set parts={sorted(losses)}"
            raise ValueError(
                f"MeanLoss: the loss must return {sorted(state)}, got {sorted(losses)}{hint}"
            )
        return {
            name: mean.add(*_sum_and_weight(losses[name], batch)) for name, mean in state.items()
        }

    def compute(self, state: dict[str, Mean]) -> dict[str, float]:
        """Return the total, then the mean of each part."""
        if not self.parts:
            return {"loss": state["loss"].value()}
        parts = {name: state[name].value() for name in self.parts}
        return {"loss": sum(value for name, value in parts.items() if "loss" in name), **parts}


def _sum_and_weight(
    loss: ArrayLike | tuple[ArrayLike, ArrayLike], batch: Batch
) -> tuple[jax.Array, jax.Array]:
    """Return a batch's summed loss without padding, and the number or the weight of the
    examples.
    """
    if isinstance(loss, tuple):
        total, weight = loss  # for example of all tokens
        return jnp.asarray(total), jnp.asarray(weight)
    loss = jnp.asarray(loss)
    mask = example_mask(batch)
    batch_size = mask.shape[0]
    if loss.ndim == 0:
        count = mask.sum()
        # A batch of padding has no mean: its loss may be NaN and must not affect the sum.
        return jnp.where(count > 0, at_least_float32(loss) * count, 0.0), count
    if are_whole():
        return at_least_float32(loss).mean(), mask.sum()
    if loss.shape[0] != batch_size:
        raise ValueError(
            f"MeanLoss: the loss must be a scalar or have shape [{batch_size}, ...], got "
            f"{loss.shape}"
        )
    per_example = at_least_float32(loss).mean(axis=tuple(range(1, loss.ndim)))
    # `where` and not a product with the mask: NaN * 0 is NaN.
    return jnp.where(mask, per_example, 0.0).sum(), mask.sum()
