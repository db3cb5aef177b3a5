"""Adagrad and Adadelta with the formulas of torch.optim."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import ScaleByRssState, Updates

from jengine.config.annotations import Decay, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer


@define_optimizer("lr", "lr_decay", "weight_decay", "eps", decay="coupled")
def Adagrad(
    lr: NonNegative = 1e-2,
    lr_decay: NonNegative = 0.0,
    weight_decay: NonNegative = 0.0,
    initial_accumulator_value: NonNegative = 0.0,
    eps: NonNegative = 1e-10,
    maximize: bool = False,
) -> Parts:
    """Build Adagrad (Duchi et al., JMLR 2011) with coupled weight decay.

    Args:
      lr: learning rate.
      lr_decay: after n updates the learning rate is divided by `1 + n * lr_decay`.
      weight_decay: coupled weight decay.
      initial_accumulator_value: initial sum of squares.
      eps: added to the root of the sum.
      maximize: maximize the loss.
    """
    return [
        ("scale_by_adagrad", scale_by_adagrad(initial_accumulator_value, eps)),
        # Traced, with a count in the state: the host changes `lr` only by schedules, and this one
        # belongs to the optimizer.
        ("scale_by_schedule", optax.scale_by_schedule(lambda count: 1 / (1 + count * lr_decay))),
    ]


@define_optimizer("lr", "rho", "eps", "weight_decay", decay="coupled")
def Adadelta(
    lr: NonNegative = 1.0,
    rho: Decay = 0.9,
    eps: NonNegative = 1e-6,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
) -> Parts:
    """Build Adadelta (Zeiler, arXiv:1212.5701) with coupled weight decay.

    Args:
      lr: multiplies the update.
      rho: decay rate for the averages of squares.
      eps: added to both averages.
      weight_decay: weight decay coefficient.
      maximize: maximize the loss.
    """
    return [("scale_by_adadelta", optax.scale_by_adadelta(rho, eps))]


def scale_by_adagrad(initial_accumulator_value: float, eps: Scalar) -> optax.GradientTransformation:
    """Divide gradients by the root of the summed squares.

    `optax.scale_by_rss` adds eps inside the root.
    """

    def init(params: Any) -> ScaleByRssState:
        # Added to zeros, so that the state has the sharding of the parameters; `jnp.full` would be
        # replicated.
        return ScaleByRssState(
            jax.tree.map(lambda z: z + initial_accumulator_value, common.zeros_like(params))
        )

    def update(
        grads: Updates, state: ScaleByRssState, params: Any | None = None
    ) -> tuple[Updates, ScaleByRssState]:
        sum_of_squares = jax.tree.map(lambda s, g: s + g * g, state.sum_of_squares, grads)
        updates = jax.tree.map(lambda g, s: g / (jnp.sqrt(s) + eps), grads, sum_of_squares)
        return updates, ScaleByRssState(sum_of_squares)

    return optax.GradientTransformation(init, update)
