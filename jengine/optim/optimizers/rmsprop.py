"""RMSprop as torch.optim.RMSprop defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class RMSpropState(NamedTuple):
    """State of RMSprop."""

    squares: Tree  # float32, like the parameters: mean of the squared gradients
    mean: Tree  # float32, like the parameters: mean of the gradients; None unless centered
    momentum: Tree  # float32, like the parameters; None without momentum in any group


@OPTIMIZERS.register_module()
def RMSprop(
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """RMSprop (Hinton, lecture notes), centered as in Graves (arXiv:1308.0850).

    `optax.rmsprop` multiplies by the learning rate before the momentum, so that a schedule acts with a delay.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("RMSprop", lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    settings = {
        "lr": lr,
        "alpha": alpha,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "centered": centered,
        "maximize": maximize,
    }
    return Optimizer("RMSprop", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    centered = core.shared_flag("RMSprop", groups, "centered")
    maximize = core.shared_flag("RMSprop", groups, "maximize")
    with_momentum = any(group["momentum"] for group in groups)
    settings = ("lr", "alpha", "eps", "weight_decay")

    def init(params: Tree) -> RMSpropState:
        return RMSpropState(
            core.zeros_like(params),
            core.zeros_like(params) if centered else None,
            core.zeros_like(params) if with_momentum else None,
        )

    def update(grads: Tree, state: RMSpropState, params: Tree, hp: Numbers) -> tuple[Tree, RMSpropState]:
        """Gradients over the root of their mean square, or of their variance."""
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        complement = core.per_group(lambda alpha: 1 - alpha, hp["alpha"])
        squares = core.mean_of_squares(state.squares, complement, grads)
        if centered:
            mean = core.mean(state.mean, complement, grads)
            # rounding may leave a variance of minus almost nothing
            variance = jax.tree.map(lambda s, m: jnp.maximum(s - m * m, 0), squares, mean)
        else:
            mean, variance = None, squares
        direction = jax.tree.map(lambda g, v, eps: g / (jnp.sqrt(v) + eps), grads, variance, hp["eps"])
        momentum = None
        if with_momentum:
            momentum = jax.tree.map(lambda m, b, d: m * b + d, hp["momentum"], state.momentum, direction)
            direction = momentum
        updates = jax.tree.map(lambda lr, d: -lr * d, hp["lr"], direction)
        return updates, RMSpropState(squares, mean, momentum)

    if with_momentum:
        return Core(init, update, core.numbers_of(*settings, "momentum"))
    return Core(init, update, core.numbers_without_momentum("RMSprop", *settings))
