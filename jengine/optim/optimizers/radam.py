"""RAdam as torch.optim.RAdam defines it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.optim.optimizers.adam import AdamState
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def RAdam(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Rectified Adam (Liu et al., arXiv:1908.03265); eps joins before the bias correction, in optax after it.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("RAdam", lr=lr, eps=eps, weight_decay=weight_decay)
    settings = {
        "lr": lr,
        "betas": core.betas_in_range("RAdam", betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "maximize": maximize,
    }
    return Optimizer("RAdam", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    decoupled = core.shared_flag("RAdam", groups, "decoupled_weight_decay")
    maximize = core.shared_flag("RAdam", groups, "maximize")

    def init(params: Tree) -> AdamState:
        return AdamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params), None)

    def update(grads: Tree, state: AdamState, params: Tree, hp: Numbers) -> tuple[Tree, AdamState]:
        """First moments, over the root of the second as soon as that can be trusted."""
        grads = core.negate(grads) if maximize else grads
        if not decoupled:
            grads = core.add_decay(grads, params, hp["weight_decay"])
        steps = state.steps + 1
        mu = core.mean(state.mu, hp["beta1_complement"], grads)
        nu = core.mean_of_squares(state.nu, hp["beta2_complement"], grads)
        rate = core.per_group(jnp.divide, hp["lr"], core.bias_correction(hp["beta1_complement"], steps))
        rectified = core.per_group(lambda c: _rectification(c, steps), hp["beta2_complement"])
        adapts = core.per_group(lambda c: _length(c, steps) > 5, hp["beta2_complement"])

        def leaf(rate: Any, eps: Any, m: Any, v: Any, factor: Any, adapts: Any) -> jax.Array:
            return -rate * m * jnp.where(adapts, factor / (jnp.sqrt(v) + eps), 1)

        updates = jax.tree.map(leaf, rate, hp["eps"], mu, nu, rectified, adapts)
        if decoupled:
            updates = core.add_decoupled_decay(updates, params, hp)
        return updates, AdamState(steps, mu, nu, None)

    return Core(init, update, core.numbers_of("lr", "betas", "eps", "weight_decay"))


def _length(complement: jax.Array, steps: jax.Array) -> jax.Array:
    """The length of the approximated moving average, rho_t of the paper.

    `rho_inf - 2 t beta**t / (1 - beta**t)` is 1999 minus 1994 in the first steps: in float32 nothing is left of the
    difference. There its series in `x = -t log(beta)` serves.
    """
    rate = -jnp.log1p(-complement)
    t = steps.astype(complement.dtype)
    x = t * rate
    plain = 2 / complement - 1 - 2 * t / jnp.expm1(x)
    x2 = x * x
    series = t + rate / 6 - 2 * t * x * (1 / 12 - x2 * (1 / 720 - x2 * (1 / 30240 - x2 / 1209600)))
    return jnp.where(x < 1, series, plain)


def _rectification(complement: jax.Array, steps: jax.Array) -> jax.Array:
    infinite = 2 / complement - 1
    length = jnp.maximum(_length(complement, steps), 5)  # below it the value is not used
    factor = (length - 4) * (length - 2) * infinite / ((infinite - 4) * (infinite - 2) * length)
    return jnp.sqrt(factor * core.bias_correction(complement, steps))
