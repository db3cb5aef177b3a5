"""Define SGD and averaged SGD with the formulas of torch.optim."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.annotations import Fraction, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Tree
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.transforms import add_decayed_weights_by_rule
from jengine.optim.transforms.groups import broadcast_to_params
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def SGD(
    lr: NonNegative = 1e-3,
    momentum: Fraction = 0.0,
    dampening: Fraction = 0.0,
    weight_decay: NonNegative = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build SGD with coupled weight decay. Without momentum it has no state.

    Args:
      lr: learning rate.
      momentum: decay rate of the momentum; 0 for none.
      dampening: reduces the contribution of the gradient to the momentum.
      weight_decay: coefficient of the weight decay.
      nesterov: use Nesterov momentum.
      maximize: maximize the loss.

    Raises:
      ValueError: a negative setting, or nesterov without momentum or with dampening.
    """
    check_nesterov("SGD", nesterov, momentum, dampening)
    settings = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    hyperparams = ("lr", "momentum", "dampening", "weight_decay")
    return Optimizer("SGD", settings, _sgd_parts, hyperparams, absent_at_zero=("weight_decay", "momentum", "dampening"))


@OPTIMIZERS.register_module()
def ASGD(
    lr: NonNegative = 1e-2,
    lambd: NonNegative = 1e-4,
    alpha: NonNegative = 0.75,
    t0: NonNegative = 1e6,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Build ASGD, averaged SGD (Polyak and Juditsky, 1992). As in PyTorch, a new lr takes effect one update later.

    Args:
      lr: learning rate.
      lambd: decay of the parameters.
      alpha: exponent in the decay of the rate.
      t0: the update at which averaging begins.
      weight_decay: coupled weight decay.
      maximize: maximize the objective.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = {
        "lr": lr,
        "lambd": lambd,
        "alpha": alpha,
        "t0": t0,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    hyperparams = ("lr", "lambd", "alpha", "t0", "weight_decay")
    return Optimizer("ASGD", settings, _asgd_parts, hyperparams, whole_tensor=True)


def momentum_parts(momentum: Any, dampening: Any, nesterov: bool) -> Parts:
    """Return the part with the momentum of SGD; no part if the momentum is the constant 0."""
    if common.is_zero(momentum):
        return []
    if common.is_zero(dampening):
        return [("scale_by_momentum", optax.trace(momentum, nesterov))]
    return [("scale_by_momentum", dampened_trace(momentum, dampening))]


def check_nesterov(optimizer: str, nesterov: bool, momentum: float, dampening: float) -> None:
    """Check the arguments of Nesterov momentum.

    Raises:
      ValueError: nesterov without momentum or with dampening.
    """
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"{optimizer}: nesterov must have momentum above 0 and dampening 0, got momentum={momentum}, "
            f"dampening={dampening}"
        )


class DampenedTraceState(NamedTuple):
    """Hold the state of momentum with dampening."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    trace: Tree  # float32, like the parameters


def dampened_trace(decay: Any, dampening: Any) -> optax.GradientTransformation:
    """Sum gradients with decay and dampening; `optax.trace` has no dampening.

    All gradients except the first have the weight `1 - dampening`; with a momentum of 0 the sum is the gradient.

    Args:
      decay: the momentum.
      dampening: reduces the weight of a gradient in the sum.
    """

    def init(params: Tree) -> DampenedTraceState:
        return DampenedTraceState(common.zero_count(), common.zeros_like(params))

    def update(grads: Tree, state: DampenedTraceState, params: Tree = None) -> tuple[Tree, DampenedTraceState]:
        weight = jnp.where((state.count == 0) | (decay == 0), 1, 1 - dampening)
        trace = jax.tree.map(lambda m, g: m * decay + weight * g, state.trace, grads)
        return trace, DampenedTraceState(state.count + 1, trace)

    return optax.GradientTransformation(init, update)


class AveragedSgdState(NamedTuple):
    """Hold the state of averaged SGD."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    eta: Tree  # float32[] per leaf: the rate of the next update, computed from the learning rate of this one
    average: Tree  # float32, like the parameters: their average, for the user


def averaged_sgd(learning_rate: Any, lambd: Any, alpha: Any, t0: Any) -> optax.GradientTransformation:
    """Descend with a decaying rate and average the parameters in the state; optax has no such transformation.

    Args:
      learning_rate: a number, or a tree of numbers like the parameters.
      lambd: decay of the parameters.
      alpha: exponent in the decay of the rate.
      t0: the update at which averaging begins.
    """

    def init(params: Tree) -> AveragedSgdState:
        eta = jax.tree.map(lambda p: jnp.zeros((), common.state_dtype(p.dtype)), params)
        return AveragedSgdState(common.zero_count(), eta, common.zeros_like(params))

    def update(grads: Tree, state: AveragedSgdState, params: Tree = None) -> tuple[Tree, AveragedSgdState]:
        params = common.require_params("ASGD", params)
        count = state.count + 1
        rates = broadcast_to_params(learning_rate, params)
        eta = jax.tree.map(lambda lr, e: jnp.where(state.count == 0, lr, e), rates, state.eta)
        updates = jax.tree.map(lambda e, p, g: -e * (lambd * p + g), eta, params, grads)
        weight = 1 / jnp.maximum(1, state.count - t0)
        average = jax.tree.map(lambda a, p, u: a + weight * (p + u - a), state.average, params, updates)
        eta = jax.tree.map(lambda lr, e: (lr / (1 + lambd * lr * count) ** alpha).astype(e.dtype), rates, eta)
        return updates, AveragedSgdState(count, eta, average)

    return optax.GradientTransformation(init, update)


def _sgd_parts(lr: Any, momentum: Any, dampening: Any, weight_decay: Any, nesterov: bool, maximize: bool) -> Parts:
    scale = momentum_parts(momentum, dampening, nesterov)
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)


def _asgd_parts(lr: Any, lambd: Any, alpha: Any, t0: Any, weight_decay: Any, maximize: bool) -> Parts:
    return [
        *common.ascent_parts(maximize),
        ("add_decayed_weights", add_decayed_weights_by_rule(weight_decay)),
        ("averaged_sgd", averaged_sgd(lr, lambd, alpha, t0)),
    ]
