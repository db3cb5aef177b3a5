"""Stochastic gradient descent as torch.optim.SGD defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class MomentumState(NamedTuple):
    """State of SGD with momentum."""

    steps: jax.Array  # int32[], updates done
    momentum: Tree  # float32, like the parameters


@OPTIMIZERS.register_module()
def SGD(
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """SGD with coupled weight decay. Without momentum in any group it holds no state.

    Unlike `optax.sgd` it knows dampening, whose first momentum is the undampened gradient.

    Raises:
      ValueError: a negative setting, or nesterov without momentum or with dampening.
    """
    core.in_range("SGD", lr=lr, momentum=momentum, weight_decay=weight_decay)
    core.in_range("SGD", low=-float("inf"), dampening=dampening)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"SGD: nesterov needs momentum above 0 and dampening 0, found momentum={momentum}, dampening={dampening}"
        )
    return Optimizer(
        name="SGD",
        defaults={
            "lr": lr,
            "momentum": momentum,
            "dampening": dampening,
            "weight_decay": weight_decay,
            "nesterov": nesterov,
            "maximize": maximize,
        },
        plan=_plan,
    )


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    nesterov = core.shared_flag("SGD", groups, "nesterov")
    maximize = core.shared_flag("SGD", groups, "maximize")
    if any(group["momentum"] for group in groups):
        return _with_momentum(nesterov, maximize)
    return _plain(maximize)


def _plain(maximize: bool) -> Core:
    def update(grads: Tree, state: None, params: Tree, hp: Numbers) -> tuple[Tree, None]:
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        return jax.tree.map(lambda lr, g: -lr * g, hp["lr"], grads), state

    return Core(lambda params: None, update, core.numbers_without_momentum("SGD", "lr", "weight_decay"))


def _with_momentum(nesterov: bool, maximize: bool) -> Core:
    def init(params: Tree) -> MomentumState:
        return MomentumState(core.step_zero(), core.zeros_like(params))

    def update(grads: Tree, state: MomentumState, params: Tree, hp: Numbers) -> tuple[Tree, MomentumState]:
        """Momentum of the gradients times the rate."""
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        intake = core.momentum_intake(state.steps, hp)
        momentum = jax.tree.map(lambda m, b, k, g: m * b + k * g, hp["momentum"], state.momentum, intake, grads)
        if nesterov:
            direction = jax.tree.map(lambda g, m, b: g + m * b, grads, hp["momentum"], momentum)
        else:
            direction = momentum
        updates = jax.tree.map(lambda lr, d: -lr * d, hp["lr"], direction)
        return updates, MomentumState(state.steps + 1, momentum)

    return Core(init, update, core.numbers_of("lr", "momentum", "dampening", "weight_decay"))
