"""LAMB as MMPretrain defines it."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.clip import global_norm
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.optim.optimizers.adam import AdamState
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def Lamb(
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-6,
    weight_decay: float = 0.01,
    grad_averaging: bool = True,
    max_grad_norm: float | None = 1.0,
    trust_clip: bool = False,
    always_adapt: bool = False,
) -> Optimizer:
    """LAMB (You et al., arXiv:1904.00962). Tensors without weight decay are not adapted, which `optax.lamb` does.

    Args:
      lr: learning rate.
      bias_correction: correct the moments for their start at zero.
      betas: decay of the two moments.
      eps: added to the root of the second moment.
      weight_decay: decay, inside the trust ratio.
      grad_averaging: weigh a new gradient by `1 - betas[0]`.
      max_grad_norm: the gradients of all tensors together are scaled down to this norm; None for never.
      trust_clip: the trust ratio is at most 1.
      always_adapt: adapt tensors without weight decay too.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Lamb", lr=lr, eps=eps, weight_decay=weight_decay)
    settings = {
        "lr": lr,
        "bias_correction": bias_correction,
        "betas": core.betas_in_range("Lamb", betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "grad_averaging": grad_averaging,
        "max_grad_norm": max_grad_norm,
        "trust_clip": trust_clip,
        "always_adapt": always_adapt,
    }
    return Optimizer("Lamb", settings, _plan, whole_tensor=True)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    flags = ("bias_correction", "grad_averaging", "max_grad_norm", "trust_clip", "always_adapt")
    corrects, averages, max_norm, trust_clip, always = (core.shared_flag("Lamb", groups, flag) for flag in flags)

    def init(params: Tree) -> AdamState:
        return AdamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params), None)

    def update(grads: Tree, state: AdamState, params: Tree, hp: Numbers) -> tuple[Tree, AdamState]:
        """Adam's step of each tensor, brought to the size that the trust ratio says."""
        if max_norm is not None:
            excess = jnp.maximum(global_norm(grads) / max_norm, 1)
            grads = jax.tree.map(lambda g: g / excess.astype(g.dtype), grads)
        steps = state.steps + 1
        if averages:
            mu = core.mean(state.mu, hp["beta1_complement"], grads)
        else:
            mu = jax.tree.map(lambda c, m, g: (1 - c) * m + g, hp["beta1_complement"], state.mu, grads)
        nu = core.mean_of_squares(state.nu, hp["beta2_complement"], grads)
        first, second = (
            core.bias_correction(hp[f"beta{i}_complement"], steps)
            if corrects
            else core.per_group(jnp.ones_like, hp[f"beta{i}_complement"])
            for i in (1, 2)
        )

        def leaf(p: Any, m: Any, v: Any, bc1: Any, bc2: Any, lr: Any, eps: Any, weight_decay: Any) -> jax.Array:
            direction = (m / bc1) / (jnp.sqrt(v) / jnp.sqrt(bc2) + eps) + weight_decay * p
            w_norm, d_norm = core.norm(p), core.norm(direction)
            trust = jnp.where((w_norm > 0) & (d_norm > 0), w_norm / d_norm, 1)
            trust = jnp.minimum(trust, 1) if trust_clip else trust
            return -lr * direction * (trust if always else jnp.where(weight_decay != 0, trust, 1))

        updates = jax.tree.map(leaf, params, mu, nu, first, second, hp["lr"], hp["eps"], hp["weight_decay"])
        return updates, AdamState(steps, mu, nu, None)

    return Core(init, update, core.numbers_of("lr", "betas", "eps", "weight_decay"))
