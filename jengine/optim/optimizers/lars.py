"""LARS as MMSelfSup defines it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.optim.optimizers.sgd import MomentumState
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def LARS(
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    eta: float = 0.001,
    nesterov: bool = False,
    eps: float = 1e-8,
) -> Optimizer:
    """Layer-wise adaptive rate scaling (You et al., arXiv:1708.03888).

    The trust ratio is `eta |w| / (|g| + weight_decay |w| + eps)` a tensor, 1 where a norm is 0; `optax.lars` takes the
    norm of `g + weight_decay w` instead. A group setting `lars_exclude=True` switches it off; decay then still acts.

    Raises:
      ValueError: a negative setting, or nesterov without momentum or with dampening.
    """
    core.in_range("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, eps=eps)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"LARS: nesterov needs momentum above 0 and dampening 0, found momentum={momentum}, dampening={dampening}"
        )
    settings = {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "dampening": dampening,
        "eta": eta,
        "nesterov": nesterov,
        "eps": eps,
        "lars_exclude": False,
    }
    return Optimizer("LARS", settings, _plan, whole_tensor=True)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    nesterov = core.shared_flag("LARS", groups, "nesterov")

    def init(params: Tree) -> MomentumState:
        return MomentumState(core.step_zero(), core.zeros_like(params))

    def update(grads: Tree, state: MomentumState, params: Tree, hp: Numbers) -> tuple[Tree, MomentumState]:
        """Momentum of gradients that are scaled by layer, the rate included."""
        scaled = jax.tree.map(
            _scaled, grads, params, hp["lr"], hp["weight_decay"], hp["eta"], hp["eps"], hp["lars_exclude"]
        )
        intake = core.momentum_intake(state.steps, hp)
        momentum = jax.tree.map(lambda m, b, k, d: m * b + k * d, hp["momentum"], state.momentum, intake, scaled)
        if nesterov:
            updates = jax.tree.map(lambda d, m, b: -(d + m * b), scaled, hp["momentum"], momentum)
        else:
            updates = core.negate(momentum)
        return updates, MomentumState(state.steps + 1, momentum)

    names = ("lr", "momentum", "weight_decay", "dampening", "eta", "eps", "lars_exclude")
    return Core(init, update, core.numbers_of(*names))


def _scaled(g: Any, w: Any, lr: Any, weight_decay: Any, eta: Any, eps: Any, exclude: Any) -> jax.Array:
    """The decayed gradient times learning rate and trust ratio: the rate is inside the momentum, unlike in SGD."""
    w_norm, g_norm = core.norm(w), core.norm(g)
    trust = eta * w_norm / (g_norm + weight_decay * w_norm + eps)
    trust = jnp.where((exclude > 0) | (w_norm == 0) | (g_norm == 0), 1, trust)
    return (g + weight_decay * w) * (lr * trust)
