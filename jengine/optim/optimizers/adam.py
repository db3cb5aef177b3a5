"""Adam and AdamW as torch.optim defines them.

The moments are those of `optax.adam`; written out here because amsgrad takes its maximum before the bias correction,
because the betas are data, and because `optax` computes `1 - beta**t` in float32, which costs a factor of ten in
accuracy.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class AdamState(NamedTuple):
    """State of Adam."""

    steps: jax.Array  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares
    nu_max: Tree  # float32, like the parameters: largest nu so far; None without amsgrad


@OPTIMIZERS.register_module()
def Adam(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> Optimizer:
    """Adam (Kingma and Ba, arXiv:1412.6980), with AMSGrad (Reddi et al., arXiv:1904.09237).

    Raises:
      ValueError: a setting outside its range.
    """
    return _adam("Adam", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay)


@OPTIMIZERS.register_module()
def AdamW(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    Raises:
      ValueError: a setting outside its range.
    """
    return _adam("AdamW", lr, betas, eps, weight_decay, amsgrad, maximize, True)


def _adam(
    name: str, lr: float, betas: Sequence[float], eps: float, weight_decay: float, amsgrad: bool, maximize: bool,
    decoupled: bool,
) -> Optimizer:  # fmt: skip
    core.in_range(name, lr=lr, eps=eps, weight_decay=weight_decay)
    return Optimizer(
        name=name,
        defaults={
            "lr": lr, "betas": core.betas_in_range(name, betas), "eps": eps, "weight_decay": weight_decay,
            "amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled,
        },
        plan=_plan_for(name),
    )  # fmt: skip


def _plan_for(name: str) -> Callable[[Sequence[Mapping[str, Any]]], Core]:
    def plan(groups: Sequence[Mapping[str, Any]]) -> Core:
        amsgrad, maximize, decoupled = (
            core.shared_flag(name, groups, flag) for flag in ("amsgrad", "maximize", "decoupled_weight_decay")
        )
        return _core(amsgrad, maximize, decoupled)

    return plan


def _core(amsgrad: bool, maximize: bool, decoupled: bool) -> Core:
    def init(params: Tree) -> AdamState:
        nu_max = core.zeros_like(params) if amsgrad else None
        return AdamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params), nu_max)

    def update(grads: Tree, state: AdamState, params: Tree, hp: Numbers) -> tuple[Tree, AdamState]:
        """Bias-corrected first moments over the root of the second."""
        grads = core.negate(grads) if maximize else grads
        if not decoupled:
            grads = core.add_decay(grads, params, hp["weight_decay"])
        count = state.steps + 1
        mu = core.mean(state.mu, hp["beta1_complement"], grads)
        nu = core.mean_of_squares(state.nu, hp["beta2_complement"], grads)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu) if amsgrad else None
        step_size = core.per_group(jnp.divide, hp["lr"], core.bias_correction(hp["beta1_complement"], count))
        root = core.per_group(jnp.sqrt, core.bias_correction(hp["beta2_complement"], count))
        updates = jax.tree.map(
            lambda s, m, v, r, eps: -s * m / (jnp.sqrt(v) / r + eps),
            step_size, mu, nu_max if amsgrad else nu, root, hp["eps"],
        )  # fmt: skip
        if decoupled:
            updates = core.add_decoupled_decay(updates, params, hp)
        return updates, AdamState(count, mu, nu, nu_max)

    return Core(init, update, core.numbers_of("lr", "betas", "eps", "weight_decay"))
