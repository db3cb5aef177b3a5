"""Rprop as torch.optim.Rprop defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class RpropState(NamedTuple):
    """State of Rprop."""

    steps: jax.Array  # int32[], updates done
    previous: Tree  # float32, like the parameters: the last gradient, 0 where it had changed its sign
    step_size: Tree  # float32, like the parameters


@OPTIMIZERS.register_module()
def Rprop(
    lr: float = 1e-2,
    etas: Sequence[float] = (0.5, 1.2),
    step_sizes: Sequence[float] = (1e-6, 50.0),
    maximize: bool = False,
) -> Optimizer:
    """Resilient backpropagation (Riedmiller and Braun, 1993); lr is the first step size and has no effect later.

    `optax.rprop` returns the update of the step before.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Rprop", lr=lr)
    if len(etas) != 2 or not 0 < etas[0] < 1 < etas[1]:
        raise ValueError(f"Rprop: etas must be two numbers with 0 < first < 1 < second, found {etas!r}")
    if len(step_sizes) != 2 or not 0 <= step_sizes[0] <= step_sizes[1]:
        raise ValueError(f"Rprop: step_sizes must be a least and a greatest size, found {step_sizes!r}")
    settings = {"lr": lr, "etas": tuple(etas), "step_sizes": tuple(step_sizes), "maximize": maximize}
    return Optimizer("Rprop", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    maximize = core.shared_flag("Rprop", groups, "maximize")

    def init(params: Tree) -> RpropState:
        return RpropState(core.step_zero(), core.zeros_like(params), core.zeros_like(params))

    def update(grads: Tree, state: RpropState, params: Tree, hp: Numbers) -> tuple[Tree, RpropState]:
        """Steps by the sign of the gradients, growing until it turns."""
        grads = core.negate(grads) if maximize else grads

        def leaf(g: Any, before: Any, size: Any, lr: Any, down: Any, up: Any, low: Any, high: Any) -> tuple[Any, ...]:
            turn = jnp.sign(g * before)
            factor = jnp.where(turn > 0, up, jnp.where(turn < 0, down, 1))
            size = jnp.clip(jnp.where(state.steps == 0, lr, size) * factor, low, high)
            g = jnp.where(turn < 0, 0, g)
            return -jnp.sign(g) * size, g, size

        rows = jax.tree.map(
            leaf, grads, state.previous, state.step_size, hp["lr"], hp["etas_0"], hp["etas_1"], hp["step_sizes_0"],
            hp["step_sizes_1"],
        )  # fmt: skip
        updates, previous, step_size = core.unzip(rows, grads, 3)
        return updates, RpropState(state.steps + 1, previous, step_size)

    return Core(init, update, core.numbers_of("lr", "etas", "step_sizes"))
