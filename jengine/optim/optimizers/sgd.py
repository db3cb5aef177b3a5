"""SGD with the formulas of torch.optim."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Fraction, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer


def check_nesterov(optimizer: str, settings: Mapping[str, Any]) -> None:
    """Raise ValueError for Nesterov momentum without momentum or with dampening."""
    # PyTorch's rule: its formula for Nesterov assumes an undamped buffer.
    momentum = settings["momentum"]
    dampening = settings["dampening"]
    if settings["nesterov"] and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"{optimizer}: nesterov must have momentum above 0 and dampening 0, got "
            f"momentum={momentum}, dampening={dampening}"
        )


@define_optimizer(
    *("lr", "momentum", "dampening", "weight_decay"),
    decay="coupled",
    check=check_nesterov,
    absent_at_zero=("weight_decay", "momentum", "dampening"),
)
def SGD(
    lr: NonNegative = 1e-3,
    momentum: Fraction = 0.0,
    dampening: Fraction = 0.0,
    weight_decay: NonNegative = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Parts:
    """Build SGD with coupled weight decay. Without momentum it has no state.

    Args:
      lr: learning rate.
      momentum: momentum decay; 0 for none.
      dampening: reduces the gradient's weight in the momentum.
      weight_decay: weight decay coefficient.
      nesterov: use Nesterov momentum.
      maximize: maximize the loss.
    """
    return momentum_parts(momentum, dampening, nesterov)


def momentum_parts(momentum: Scalar, dampening: Scalar, nesterov: bool) -> Parts:
    """Return the part with SGD's momentum; no part if the momentum is the constant 0."""
    if common.is_zero(momentum):
        return []
    if common.is_zero(dampening):
        return [("scale_by_momentum", optax.trace(momentum, nesterov))]
    return [("scale_by_momentum", dampened_trace(momentum, dampening))]


class DampenedTraceState(NamedTuple):
    """Momentum with dampening."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    trace: Any  # float32, like the parameters


def dampened_trace(decay: Scalar, dampening: Scalar) -> optax.GradientTransformation:
    """Sum gradients with decay and dampening; `optax.trace` has no dampening.

    All gradients except the first have the weight `1 - dampening`; with decay 0 the sum is the
    gradient.
    """

    def init(params: Any) -> DampenedTraceState:
        return DampenedTraceState(common.zero_count(), common.zeros_like(params))

    def update(
        grads: Updates, state: DampenedTraceState, params: Any | None = None
    ) -> tuple[Updates, DampenedTraceState]:
        # PyTorch starts its buffer with the first gradient undamped, and without momentum has no
        # buffer that would damp.
        weight = jnp.where((state.count == 0) | (decay == 0), 1, 1 - dampening)
        trace = jax.tree.map(lambda m, g: m * decay + weight * g, state.trace, grads)
        return trace, DampenedTraceState(state.count + 1, trace)

    return optax.GradientTransformation(init, update)
