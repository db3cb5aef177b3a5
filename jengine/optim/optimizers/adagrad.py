"""Adagrad as torch.optim.Adagrad defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class AdagradState(NamedTuple):
    """State of Adagrad."""

    steps: jax.Array  # int32[], updates done
    total: Tree  # float32, like the parameters: sum of the squared gradients


@OPTIMIZERS.register_module()
def Adagrad(
    lr: float = 1e-2,
    lr_decay: float = 0.0,
    weight_decay: float = 0.0,
    initial_accumulator_value: float = 0.0,
    eps: float = 1e-10,
    maximize: bool = False,
) -> Optimizer:
    """Adagrad (Duchi et al., JMLR 2011); eps joins outside the root, in optax inside it, and lr_decay is not there.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adagrad", lr=lr, lr_decay=lr_decay, weight_decay=weight_decay, eps=eps)
    core.in_range("Adagrad", initial_accumulator_value=initial_accumulator_value)
    settings = {
        "lr": lr,
        "lr_decay": lr_decay,
        "weight_decay": weight_decay,
        "initial_accumulator_value": initial_accumulator_value,
        "eps": eps,
        "maximize": maximize,
    }
    return Optimizer("Adagrad", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    maximize = core.shared_flag("Adagrad", groups, "maximize")
    start = core.shared_flag("Adagrad", groups, "initial_accumulator_value")

    def init(params: Tree) -> AdagradState:
        return AdagradState(core.step_zero(), jax.tree.map(lambda z: z + start, core.zeros_like(params)))

    def update(grads: Tree, state: AdagradState, params: Tree, hp: Numbers) -> tuple[Tree, AdagradState]:
        """Steps over the root of the sum of all squared gradients."""
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        rate = core.per_group(
            lambda lr, decay: lr / (1 + state.steps.astype(decay.dtype) * decay), hp["lr"], hp["lr_decay"]
        )
        total = jax.tree.map(lambda s, g: s + g * g, state.total, grads)
        updates = jax.tree.map(lambda r, g, s, eps: -r * g / (jnp.sqrt(s) + eps), rate, grads, total, hp["eps"])
        return updates, AdagradState(state.steps + 1, total)

    return Core(init, update, core.numbers_of("lr", "lr_decay", "weight_decay", "eps"))
