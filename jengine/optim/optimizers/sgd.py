"""Stochastic gradient descent as torch.optim.SGD defines it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def SGD(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build SGD with coupled weight decay. Without momentum it holds no state.

    Raises:
      ValueError: a negative setting, or nesterov without momentum or with dampening.
    """
    core.in_range("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
    core.in_range("SGD", low=-float("inf"), dampening=dampening)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"SGD: nesterov needs momentum above 0 and dampening 0, found momentum={momentum}, dampening={dampening}"
        )
    settings = {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
    }
    numbers = ("lr", "momentum", "dampening", "weight_decay")
    return Optimizer("SGD", settings, _parts, numbers, absent_at_zero=("weight_decay", "momentum", "dampening"))


def _parts(lr: Any, momentum: Any, dampening: Any, weight_decay: Any, nesterov: bool, maximize: bool) -> Parts:
    momentum_of = momentum_parts(momentum, dampening, nesterov)
    return core.chain_with_decay(momentum_of, lr, weight_decay, decoupled=False, maximize=maximize)


def momentum_parts(momentum: Any, dampening: Any, nesterov: bool) -> Parts:
    """Return the momentum of SGD: nothing where it is the constant 0."""
    if core.is_zero(momentum):
        return []
    if core.is_zero(dampening):
        return [("scale_by_momentum", optax.trace(momentum, nesterov))]
    return [("scale_by_momentum", dampened_trace(momentum, dampening))]


class DampenedTraceState(NamedTuple):
    """Hold the state of momentum with dampening."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    trace: Tree  # float32, like the parameters


def dampened_trace(decay: Any, dampening: Any) -> optax.GradientTransformation:
    """Sum gradients with decay and dampening, which `optax.trace` does not have.

    All but the first enter with `1 - dampening`; with a momentum of 0 the sum is the gradient.

    Args:
      decay: the momentum.
      dampening: the part of a gradient that does not enter.
    """

    def init(params: Tree) -> DampenedTraceState:
        return DampenedTraceState(core.step_zero(), core.zeros_like(params))

    def update(grads: Tree, state: DampenedTraceState, params: Tree = None) -> tuple[Tree, DampenedTraceState]:
        intake = jnp.where((state.count == 0) | (decay == 0), 1, 1 - dampening)
        trace = jax.tree.map(lambda m, g: m * decay + intake * g, state.trace, grads)
        return trace, DampenedTraceState(state.count + 1, trace)

    return optax.GradientTransformation(init, update)
