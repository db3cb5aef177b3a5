"""Adadelta as torch.optim.Adadelta defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class AdadeltaState(NamedTuple):
    """State of Adadelta."""

    squares: Tree  # float32, like the parameters: mean of the squared gradients
    deltas: Tree  # float32, like the parameters: mean of the squared updates


@OPTIMIZERS.register_module()
def Adadelta(
    lr: float = 1.0, rho: float = 0.9, eps: float = 1e-6, weight_decay: float = 0.0, maximize: bool = False
) -> Optimizer:
    """Adadelta (Zeiler, arXiv:1212.5701); the numbers of `optax.adadelta` after coupled decay.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adadelta", lr=lr, eps=eps, weight_decay=weight_decay)
    core.in_range("Adadelta", below=1.0, rho=rho)
    settings = {"lr": lr, "rho": rho, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    return Optimizer("Adadelta", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    maximize = core.shared_flag("Adadelta", groups, "maximize")

    def init(params: Tree) -> AdadeltaState:
        return AdadeltaState(core.zeros_like(params), core.zeros_like(params))

    def update(grads: Tree, state: AdadeltaState, params: Tree, hp: Numbers) -> tuple[Tree, AdadeltaState]:
        """Steps of the size that earlier steps had, over that of the gradients."""
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        complement = core.per_group(lambda rho: 1 - rho, hp["rho"])
        squares = core.mean_of_squares(state.squares, complement, grads)
        delta = jax.tree.map(
            lambda d, s, g, eps: jnp.sqrt(d + eps) / jnp.sqrt(s + eps) * g, state.deltas, squares, grads, hp["eps"]
        )
        deltas = core.mean_of_squares(state.deltas, complement, delta)
        return jax.tree.map(lambda lr, d: -lr * d, hp["lr"], delta), AdadeltaState(squares, deltas)

    return Core(init, update, core.numbers_of("lr", "rho", "eps", "weight_decay"))
