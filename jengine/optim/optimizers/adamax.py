"""Adamax as torch.optim.Adamax defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class AdamaxState(NamedTuple):
    """State of Adamax."""

    steps: jax.Array  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    peak: Tree  # float32, like the parameters: decaying maximum of their magnitudes


@OPTIMIZERS.register_module()
def Adamax(
    lr: float = 2e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Adam with the infinity norm (Kingma and Ba, arXiv:1412.6980); the numbers of `optax.adamax` after coupled decay.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adamax", lr=lr, eps=eps, weight_decay=weight_decay)
    betas = core.betas_in_range("Adamax", betas)
    settings = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "maximize": maximize}
    return Optimizer("Adamax", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    maximize = core.shared_flag("Adamax", groups, "maximize")

    def init(params: Tree) -> AdamaxState:
        return AdamaxState(core.step_zero(), core.zeros_like(params), core.zeros_like(params))

    def update(grads: Tree, state: AdamaxState, params: Tree, hp: Numbers) -> tuple[Tree, AdamaxState]:
        """Bias-corrected first moments over a decaying maximum."""
        grads = core.add_decay(core.negate(grads) if maximize else grads, params, hp["weight_decay"])
        steps = state.steps + 1
        mu = core.mean(state.mu, hp["beta1_complement"], grads)
        peak = jax.tree.map(
            lambda c, u, g, eps: jnp.maximum((1 - c) * u, jnp.abs(g) + eps),
            hp["beta2_complement"],
            state.peak,
            grads,
            hp["eps"],
        )
        rate = core.per_group(jnp.divide, hp["lr"], core.bias_correction(hp["beta1_complement"], steps))
        updates = jax.tree.map(lambda r, m, u: -r * m / u, rate, mu, peak)
        return updates, AdamaxState(steps, mu, peak)

    return Core(init, update, core.numbers_of("lr", "betas", "eps", "weight_decay"))
