"""Averaged SGD as torch.optim.ASGD defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class ASGDState(NamedTuple):
    """State of averaged SGD."""

    steps: jax.Array  # int32[], updates done
    eta: Tree  # float32[] a leaf: the rate of the next update, made from the lr of this one
    average: Tree  # float32, like the parameters: their average, for the user


@OPTIMIZERS.register_module()
def ASGD(
    lr: float = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Averaged SGD (Polyak and Juditsky, 1992). A change of lr acts one update later, as in PyTorch.

    Args:
      lr: learning rate.
      lambd: decay of the parameters.
      alpha: power of the decay of the rate.
      t0: the update at which averaging begins.
      weight_decay: coupled decay.
      maximize: climb.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("ASGD", lr=lr, weight_decay=weight_decay)
    settings = {
        "lr": lr,
        "lambd": lambd,
        "alpha": alpha,
        "t0": t0,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return Optimizer("ASGD", settings, _plan, whole_tensor=True)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    maximize = core.shared_flag("ASGD", groups, "maximize")

    def init(params: Tree) -> ASGDState:
        eta = jax.tree.map(lambda p: jnp.zeros((), core.state_dtype(p.dtype)), params)
        return ASGDState(core.step_zero(), eta, core.zeros_like(params))

    def update(grads: Tree, state: ASGDState, params: Tree, hp: Numbers) -> tuple[Tree, ASGDState]:
        """Steps of a decaying size; the average of the parameters is kept in the state."""
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        steps = state.steps + 1
        eta = jax.tree.map(lambda lr, e: jnp.where(state.steps == 0, lr, e), hp["lr"], state.eta)
        updates = jax.tree.map(lambda e, k, p, g: -e * (k * p + g), eta, hp["lambd"], params, grads)
        weight = core.per_group(lambda t0: 1 / jnp.maximum(1, state.steps.astype(t0.dtype) - t0), hp["t0"])
        average = jax.tree.map(lambda w, a, p, u: a + w * (p + u - a), weight, state.average, params, updates)
        following = core.per_group(
            lambda lr, k, alpha: lr / (1 + k * lr * steps.astype(lr.dtype)) ** alpha,
            hp["lr"],
            hp["lambd"],
            hp["alpha"],
        )
        return updates, ASGDState(steps, following, average)

    return Core(init, update, core.numbers_of("lr", "lambd", "alpha", "t0", "weight_decay"))
