"""Optax's own optimizers, by their optax names and arguments, and optax chains that the user built."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import optax

from jengine.optim.core import Core, Numbers, Optimizer, Tree, numbers_of


def from_optax(transformation: optax.GradientTransformation) -> Optimizer:
    """A chain that is already built, as an optimizer of one group whose lr, 1.0 at first, multiplies its updates."""
    tx = optax.with_extra_args_support(transformation)

    def update(grads: Tree, state: Any, params: Tree, hp: Numbers) -> tuple[Tree, Any]:
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(lambda lr, u: lr * u, hp["lr"], updates), state

    def plan(groups: Sequence[Mapping[str, Any]]) -> Core:
        return Core(tx.init, update, numbers_of("lr"))

    return Optimizer("optax", {"lr": 1.0}, plan, whole_tensor=True)
