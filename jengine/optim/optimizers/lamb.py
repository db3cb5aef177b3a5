"""LAMB as MMPretrain defines it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.optim.optimizers.adam import init_moments, scale_by_adam
from jengine.optim.transforms import add_decayed_weights_by_rule, scale_by_group_learning_rate
from jengine.optim.transforms.groups import by_leaf
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
    """Build LAMB (You et al., arXiv:1904.00962). Tensors without weight decay are not adapted.

    Args:
      lr: learning rate.
      bias_correction: correct the moments for their start at zero.
      betas: decay of the two moments.
      eps: added to the root of the second moment.
      weight_decay: decay, inside the trust ratio.
      grad_averaging: weigh a new gradient by `1 - betas[0]`.
      max_grad_norm: the gradients of all tensors together are scaled down to this norm; None for never. Groups that
        differ in more than lr and weight_decay are clipped each by themselves.
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
    return Optimizer("Lamb", settings, _parts, ("lr", "betas", "eps", "weight_decay"), whole_tensor=True)


def _parts(
    lr: Any, bias_correction: bool, betas: Any, eps: Any, weight_decay: Any, grad_averaging: bool,
    max_grad_norm: float | None, trust_clip: bool, always_adapt: bool,
) -> Parts:  # fmt: skip
    b1, b2 = betas
    if bias_correction and grad_averaging:
        scale = scale_by_adam(b1, b2, eps)
    else:
        scale = scale_by_lamb_moments(b1, b2, eps, bias_correction, grad_averaging)
    return [
        *([] if max_grad_norm is None else [("clip_by_global_norm", optax.clip_by_global_norm(max_grad_norm))]),
        ("scale_by_adam", scale),
        ("add_decayed_weights", add_decayed_weights_by_rule(weight_decay)),
        ("scale_by_trust_ratio", scale_by_trust_ratio(True if always_adapt else weight_decay, trust_clip)),
        ("scale_by_learning_rate", scale_by_group_learning_rate(lr)),
    ]


def scale_by_lamb_moments(
    b1: Any, b2: Any, eps: Any, bias_correction: bool, grad_averaging: bool
) -> optax.GradientTransformation:
    """Rescale gradients by Adam without one of its corrections, which `optax.scale_by_adam` always makes.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
      bias_correction: correct the moments for their start at zero.
      grad_averaging: weigh a new gradient by `1 - b1`, not by 1.
    """

    def update(grads: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count = state.count + 1
        if grad_averaging:
            mu = core.moving_average(state.mu, b1, grads)
        else:
            mu = jax.tree.map(lambda m, g: b1 * m + g, state.mu, grads)
        nu = core.moving_average_of_squares(state.nu, b2, grads)
        first, second = (core.bias_correction(b, count) if bias_correction else 1.0 for b in (b1, b2))
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_moments, update)


def scale_by_trust_ratio(adapt: Any, trust_clip: bool = False) -> optax.GradientTransformation:
    """Bring the update of each tensor to the norm of the tensor; `optax.scale_by_trust_ratio` adapts all tensors.

    Args:
      adapt: where it is 0 the tensor is not adapted; a number, or a tree of numbers like the parameters.
      trust_clip: the ratio is at most 1.
    """

    def leaf(u: Any, p: Any, adapted: Any) -> jax.Array:
        p_norm, u_norm = core.norm(p), core.norm(u)
        ratio = jnp.where((adapted != 0) & (p_norm > 0) & (u_norm > 0), p_norm / u_norm, 1)
        return u * (jnp.minimum(ratio, 1) if trust_clip else ratio)

    def update(updates: Tree, params: Tree) -> Tree:
        params = core.need_params("Lamb", params)
        return jax.tree.map(leaf, updates, params, by_leaf(adapt, params))

    return optax.stateless(update)
