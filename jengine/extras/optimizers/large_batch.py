"""LARS with the formulas of MMSelfSup, and LAMB with those of MMPretrain."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Decay, Fraction, NonNegative, Positive
from jengine.extras.optimizers import trees
from jengine.optim.optimizers import common
from jengine.optim.optimizers.adam import init_moments, scale_by_adam
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer
from jengine.optim.optimizers.sgd import check_nesterov, momentum_parts
from jengine.optim.transforms.groups import (
    PerParameter,
    add_decayed_weights_by_rule,
    broadcast_to_params,
    scale_by_group_learning_rate,
)


@define_optimizer(
    *("lr", "momentum", "weight_decay", "dampening", "eta", "eps", "lars_exclude"),
    check=check_nesterov,
    per_parameter=("lr", "weight_decay", "lars_exclude"),
    absent_at_zero=("weight_decay", "momentum", "dampening"),
    by_layer=True,
)
def LARS(
    lr: NonNegative,
    momentum: Fraction = 0.0,
    weight_decay: NonNegative = 0.0,
    dampening: Fraction = 0.0,
    eta: NonNegative = 0.001,
    nesterov: bool = False,
    eps: NonNegative = 1e-8,
    lars_exclude: bool = False,
    stacked: Any = None,
) -> Parts:
    """Build LARS, layer-wise adaptive rate scaling (You et al., arXiv:1708.03888).

    Each of stacked layers has a trust ratio.

    Without momentum it has no state.

    Unlike in SGD, the learning rate is applied before the momentum.

    Args:
      lr: learning rate.
      momentum, dampening, nesterov: see `SGD`.
      weight_decay: coupled weight decay, included in the trust ratio.
      eta: multiplies the trust ratio.
      eps: added to the trust ratio's denominator.
      lars_exclude: disable the trust ratio, but not the weight decay; usually set for some
        parameter groups.
    """
    # The rate is inside, before the momentum, as in the paper: a change of the rate does not
    # rescale the steps remembered.
    scale = scale_by_lars(lr, weight_decay, eta, eps, lars_exclude, stacked)
    return [
        ("scale_by_lars", scale),
        *momentum_parts(momentum, dampening, nesterov),
        ("descent", optax.scale(-1.0)),
    ]


@define_optimizer("lr", "betas", "eps", "weight_decay", by_layer=True)
def Lamb(
    lr: NonNegative = 1e-3,
    bias_correction: bool = True,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-6,
    weight_decay: NonNegative = 0.01,
    grad_averaging: bool = True,
    max_grad_norm: Positive | None = 1.0,
    trust_clip: bool = False,
    always_adapt: bool = False,
    stacked: Any = None,
) -> Parts:
    """Build LAMB (You et al., arXiv:1904.00962).

    Tensors without weight decay are not scaled by the trust ratio. Each of stacked layers has a
    ratio.

    Args:
      lr: learning rate.
      bias_correction: correct the bias of the moments.
      betas: decay rates for the two moments.
      eps: added to the denominator.
      weight_decay: weight decay coefficient, included in the trust ratio.
      grad_averaging: multiply new gradients by `1 - betas[0]` in the first moment.
      max_grad_norm: maximum global gradient norm; None for no clipping. Groups that differ in more
        than lr and weight_decay are clipped separately.
      trust_clip: limit the trust ratio to 1.
      always_adapt: scale tensors without weight decay by the trust ratio too.
    """
    # Exactly Adam's moments, so that they have one implementation; only the other options need the
    # formulas below.
    if bias_correction and grad_averaging:
        scale = scale_by_adam(*betas, eps)
    else:
        scale = scale_by_lamb_moments(*betas, eps, bias_correction, grad_averaging)
    return [
        *(
            []
            if max_grad_norm is None
            else [("clip_by_global_norm", optax.clip_by_global_norm(max_grad_norm))]
        ),
        ("scale_by_adam", scale),
        ("add_decayed_weights", add_decayed_weights_by_rule(weight_decay)),
        # Per parameter: those without decay, such as biases and norms, keep the plain Adam step, as
        # in the reference code.
        (
            "scale_by_trust_ratio",
            scale_by_trust_ratio(True if always_adapt else weight_decay, trust_clip, stacked),
        ),
        ("scale_by_learning_rate", scale_by_group_learning_rate(lr)),
    ]


def scale_by_lars(
    learning_rate: PerParameter,
    weight_decay: PerParameter,
    eta: Scalar,
    eps: Scalar,
    exclude: PerParameter = False,
    stacked: Any = None,
) -> optax.GradientTransformation:
    """Add weight decay to gradients, and multiply them by the learning rate and each tensor's trust
    ratio.

    The ratio is `eta |w| / (|g| + weight_decay |w| + eps)`, or 1 if a norm is 0; `optax.lars` uses
    the norm of `g + weight_decay w` instead.

    Where `exclude` is not 0, the ratio is 1. It, the learning rate and the weight decay are
    numbers, or trees of them like the parameters; `stacked` is a tree of axes.
    """

    def leaf(
        g: jax.Array, p: jax.Array, lr: Scalar, decay: Scalar, excluded: Scalar, axes: Sequence[int]
    ) -> jax.Array:
        p_norm = trees.norm(p, axes)
        g_norm = trees.norm(g, axes)
        trust = eta * p_norm / (g_norm + decay * p_norm + eps)
        # Zero norms occur: a parameter initialized with zeros would never move with a trust of 0.
        trust = jnp.where((excluded != 0) | (p_norm == 0) | (g_norm == 0), 1, trust)
        return (g + decay * p) * (lr * trust)

    def update(grads: Updates, params: Any) -> Any:
        params = trees.require_params("LARS", params)
        hyperparams = (
            broadcast_to_params(value, params) for value in (learning_rate, weight_decay, exclude)
        )
        axes = trees.broadcast_stacked(stacked, params)
        return jax.tree.map(leaf, grads, params, *hyperparams, axes)

    return optax.stateless(update)


def scale_by_lamb_moments(
    b1: Scalar, b2: Scalar, eps: Scalar, bias_correction: bool, grad_averaging: bool
) -> optax.GradientTransformation:
    """Rescale gradients by Adam with optional bias correction and averaging.

    `optax.scale_by_adam` always applies both.

    The arguments are those of `Lamb`, with two betas.
    """

    def update(
        grads: Updates, state: optax.ScaleByAdamState, params: Any | None = None
    ) -> tuple[Updates, optax.ScaleByAdamState]:
        count = state.count + 1
        if grad_averaging:
            mu = common.moving_average(state.mu, b1, grads)
        else:
            # Without averaging the gradient has the weight 1, as in NVIDIA's LAMB with
            # grad_averaging=False.
            mu = jax.tree.map(lambda m, g: b1 * m + g, state.mu, grads)
        nu = common.moving_average_of_squares(state.nu, b2, grads)
        first, second = (
            common.bias_correction(b, count) if bias_correction else 1.0 for b in (b1, b2)
        )
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v / second) + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_moments, update)


def scale_by_trust_ratio(
    adapt: PerParameter, trust_clip: bool, stacked: Any = None
) -> optax.GradientTransformation:
    """Scale the update of each tensor to the tensor's norm.

    `optax.scale_by_trust_ratio` scales all tensors.

    Where `adapt` is 0, the tensor is not scaled; it is a number, or a tree of numbers like the
    parameters. `stacked` is a tree of axes along which layers are stacked.
    """

    def leaf(u: jax.Array, p: jax.Array, is_adapted: Scalar, axes: Sequence[int]) -> jax.Array:
        p_norm = trees.norm(p, axes)
        u_norm = trees.norm(u, axes)
        # `where` computes both sides; the quotient by zero is an infinity that is not selected, and
        # nothing differentiates it.
        ratio = jnp.where((is_adapted != 0) & (p_norm > 0) & (u_norm > 0), p_norm / u_norm, 1)
        return u * (jnp.minimum(ratio, 1) if trust_clip else ratio)

    def update(updates: Updates, params: Any) -> Any:
        params = trees.require_params("Lamb", params)
        axes = trees.broadcast_stacked(stacked, params)
        return jax.tree.map(leaf, updates, params, broadcast_to_params(adapt, params), axes)

    return optax.stateless(update)
