"""Lion as lion-pytorch defines it, which MMEngine registers."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class LionState(NamedTuple):
    """State of Lion."""

    mu: Tree  # float32, like the parameters: mean of the gradients


@OPTIMIZERS.register_module()
def Lion(lr: float = 1e-4, betas: Sequence[float] = (0.9, 0.99), weight_decay: float = 0.0) -> Optimizer:
    """Sign of an interpolated momentum (Chen et al., arXiv:2302.06675); the numbers of `optax.lion`.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Lion", lr=lr, weight_decay=weight_decay)
    settings = {"lr": lr, "betas": core.betas_in_range("Lion", betas), "weight_decay": weight_decay}
    return Optimizer("Lion", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    def init(params: Tree) -> LionState:
        return LionState(core.zeros_like(params))

    def update(grads: Tree, state: LionState, params: Tree, hp: Numbers) -> tuple[Tree, LionState]:
        direction = core.mean(state.mu, hp["beta1_complement"], grads)
        updates = jax.tree.map(lambda lr, d: -lr * jnp.sign(d), hp["lr"], direction)
        updates = core.add_decoupled_decay(updates, params, hp)
        return updates, LionState(core.mean(state.mu, hp["beta2_complement"], grads))

    return Core(init, update, core.numbers_of("lr", "betas", "weight_decay"))
