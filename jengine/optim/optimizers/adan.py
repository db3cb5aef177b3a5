"""Adan as MMPretrain defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.clip import global_norm
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class AdanState(NamedTuple):
    """State of Adan."""

    steps: jax.Array  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    delta: Tree  # float32, like the parameters: mean of their differences
    nu: Tree  # float32, like the parameters: mean of the squared look-ahead gradients
    previous: Tree  # float32, like the parameters: the last gradient


@OPTIMIZERS.register_module()
def Adan(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.98, 0.92, 0.99),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    max_grad_norm: float = 0.0,
    no_prox: bool = False,
) -> Optimizer:
    """Adaptive Nesterov momentum (Xie et al., arXiv:2208.06677) with its proximal weight decay.

    `optax.adan` weighs the difference of gradients by `1 - betas[1]` and decays as AdamW does.

    Args:
      lr: learning rate.
      betas: decay of gradients, of their differences, of squares.
      eps: added to the root of the squares.
      weight_decay: decay.
      max_grad_norm: the gradients of all tensors together are scaled down to this norm; 0 for never.
      no_prox: decay as AdamW does.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("Adan", lr=lr, eps=eps, weight_decay=weight_decay, max_grad_norm=max_grad_norm)
    settings = {
        "lr": lr,
        "betas": core.betas_in_range("Adan", betas, length=3),
        "eps": eps,
        "weight_decay": weight_decay,
        "max_grad_norm": max_grad_norm,
        "no_prox": no_prox,
    }
    return Optimizer("Adan", settings, _plan)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    no_prox = core.shared_flag("Adan", groups, "no_prox")
    max_norm = core.shared_flag("Adan", groups, "max_grad_norm")
    eps_of_norm = groups[0]["eps"]

    def init(params: Tree) -> AdanState:
        return AdanState(core.step_zero(), *(core.zeros_like(params) for _ in range(4)))

    def update(grads: Tree, state: AdanState, params: Tree, hp: Numbers) -> tuple[Tree, AdanState]:
        """Moments of the gradients and of their change, over the root of the second."""
        if max_norm > 0:
            factor = jnp.minimum(max_norm / (global_norm(grads) + eps_of_norm), 1)
            grads = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        steps = state.steps + 1
        change = jax.tree.map(lambda g, b: jnp.where(state.steps == 0, 0, g - b), grads, state.previous)
        ahead = jax.tree.map(lambda g, c, d: g + (1 - c) * d, grads, hp["beta2_complement"], change)
        mu = core.mean(state.mu, hp["beta1_complement"], grads)
        delta = core.mean(state.delta, hp["beta2_complement"], change)
        nu = core.mean_of_squares(state.nu, hp["beta3_complement"], ahead)
        corrections = [core.bias_correction(hp[f"beta{i}_complement"], steps) for i in (1, 2, 3)]

        def leaf(p: Any, m: Any, d: Any, v: Any, c: Any, b1: Any, b2: Any, b3: Any, lr: Any, eps: Any, wd: Any) -> Any:
            step = -lr * (m / b1 + (1 - c) * d / b2) / (jnp.sqrt(v) / jnp.sqrt(b3) + eps)
            return step - lr * wd * p if no_prox else (step - lr * wd * p) / (1 + lr * wd)

        updates = jax.tree.map(
            leaf, params, mu, delta, nu, hp["beta2_complement"], *corrections, hp["lr"], hp["eps"], hp["weight_decay"]
        )
        return updates, AdanState(steps, mu, delta, nu, grads)

    return Core(init, update, core.numbers_of("lr", "betas", "eps", "weight_decay"))
