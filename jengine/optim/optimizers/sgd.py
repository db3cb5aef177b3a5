"""SGD and averaged SGD with the formulas of torch.optim."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Params, Updates

from jengine.config.annotations import Fraction, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer
from jengine.optim.transforms.groups import (
    PerParameter,
    add_decayed_weights_by_rule,
    broadcast_to_params,
)


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
    scale = momentum_parts(momentum, dampening, nesterov)
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)


@define_optimizer("lr", "lambd", "alpha", "t0", "weight_decay", whole_tensor=True)
def ASGD(
    lr: NonNegative = 1e-2,
    lambd: NonNegative = 1e-4,
    alpha: NonNegative = 0.75,
    t0: NonNegative = 1e6,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
) -> Parts:
    """Build ASGD, averaged SGD (Polyak and Juditsky, 1992). As in PyTorch, a new lr takes effect
    one update later.

    Args:
      lr: learning rate.
      lambd: parameter decay.
      alpha: exponent in the rate's decay.
      t0: the update at which averaging begins.
      weight_decay: coupled weight decay.
      maximize: maximize the loss.
    """
    return [
        *common.ascent_parts(maximize),
        ("add_decayed_weights", add_decayed_weights_by_rule(weight_decay)),
        ("averaged_sgd", averaged_sgd(lr, lambd, alpha, t0)),
    ]


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
    trace: Params  # float32, like the parameters


def dampened_trace(decay: Scalar, dampening: Scalar) -> optax.GradientTransformation:
    """Sum gradients with decay and dampening; `optax.trace` has no dampening.

    All gradients except the first have the weight `1 - dampening`; with decay 0 the sum is the
    gradient.
    """

    def init(params: Params) -> DampenedTraceState:
        return DampenedTraceState(common.zero_count(), common.zeros_like(params))

    def update(
        grads: Updates, state: DampenedTraceState, params: Params | None = None
    ) -> tuple[Updates, DampenedTraceState]:
        # PyTorch starts its buffer with the first gradient undamped, and without momentum has no
        # buffer that would damp.
        weight = jnp.where((state.count == 0) | (decay == 0), 1, 1 - dampening)
        trace = jax.tree.map(lambda m, g: m * decay + weight * g, state.trace, grads)
        return trace, DampenedTraceState(state.count + 1, trace)

    return optax.GradientTransformation(init, update)


class AveragedSgdState(NamedTuple):
    """Averaged SGD's state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    # float32[] per leaf: the rate of the next update, computed from the current learning rate
    eta: Params
    average: Params  # float32, like the parameters: average parameters, for the user


def averaged_sgd(
    learning_rate: PerParameter, lambd: Scalar, alpha: Scalar, t0: Scalar
) -> optax.GradientTransformation:
    """Descend with a decaying rate and average the parameters in the state; optax has no such
    transformation.

    The arguments are those of `ASGD`; the learning rate may be a tree of numbers like the
    parameters.
    """

    def init(params: Params) -> AveragedSgdState:
        eta = jax.tree.map(lambda p: jnp.zeros((), common.state_dtype(p.dtype)), params)
        return AveragedSgdState(common.zero_count(), eta, common.zeros_like(params))

    def update(
        grads: Updates, state: AveragedSgdState, params: Params | None = None
    ) -> tuple[Updates, AveragedSgdState]:
        params = common.require_params("ASGD", params)
        count = state.count + 1
        rates = broadcast_to_params(learning_rate, params)
        # The rate of this step was computed after the last one, from the count then; the first step
        # takes `lr` itself.
        eta = jax.tree.map(lambda lr, e: jnp.where(state.count == 0, lr, e), rates, state.eta)
        updates = jax.tree.map(lambda e, p, g: -e * (lambd * p + g), eta, params, grads)
        weight = 1 / jnp.maximum(1, state.count - t0)
        # Of the parameters after this step: optax adds the updates later, so they are added here
        # for the average.
        average = jax.tree.map(
            lambda a, p, u: a + weight * (p + u - a), state.average, params, updates
        )
        # In the dtype of the state: a float64 rate would change the structure that the step was
        # compiled for.
        eta = jax.tree.map(
            lambda lr, e: (lr / (1 + lambd * lr * count) ** alpha).astype(e.dtype), rates, eta
        )
        return updates, AveragedSgdState(count, eta, average)

    return optax.GradientTransformation(init, update)
