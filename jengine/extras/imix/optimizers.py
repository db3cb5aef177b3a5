"""iMIX's optimizers for BERT-like models: Adam without bias correction, and the AdamW from
Transformers.
"""

import functools
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import CountOrNever, Decay, NonNegative, Positive
from jengine.config.registry import OPTIMIZERS
from jengine.extras.optimizers import trees
from jengine.optim.optimizers import common
from jengine.optim.optimizers.adam import scale_by_moments
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import Optimizer, define_optimizer
from jengine.optim.transforms.groups import (
    PerParameter,
    broadcast_to_params,
    scale_by_group_learning_rate,
)

Schedule = Literal["warmup_linear", "warmup_cosine", "warmup_constant"]
# not betas: without a correction `1 - b2` is off by 1e-5 in float32
_NUMBERS = ("lr", "eps", "weight_decay")


@OPTIMIZERS.register_module()
def BertAdam(
    lr: NonNegative,
    warmup: Decay | Literal[-1] = -1,
    t_total: CountOrNever = -1,
    schedule: Schedule = "warmup_linear",
    b1: Decay = 0.9,
    b2: Decay = 0.999,
    e: NonNegative = 1e-6,
    weight_decay: NonNegative = 0.01,
    max_grad_norm: NonNegative = 1.0,
) -> Optimizer:
    """Build Adam without bias correction, with decoupled weight decay and an optional schedule.

    >>> optimizer = BertAdam(lr=1e-4, warmup=0.1, t_total=1000, schedule="warmup_cosine")

    Args:
      lr: learning rate, which the schedule multiplies.
      warmup: warm-up fraction of the updates, in [0, 1), or -1 for no warm-up.
      t_total: updates in the whole run; -1 for no schedule.
      schedule: 'warmup_linear', 'warmup_cosine' or 'warmup_constant'.
      b1, b2: decay rates for the means of gradients and squared gradients.
      e: added to the root.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      max_grad_norm: without effect, as in iMIX; clip with the optimizer wrapper.
    """
    settings = {"lr": lr, "betas": (float(b1), float(b2)), "eps": e, "weight_decay": weight_decay}
    # These are constants of the chain: BertAdam computes its schedule from its own count of
    # updates.
    settings |= {"warmup": warmup, "t_total": t_total, "schedule": schedule}
    return Optimizer("BertAdam", settings, _make_bert_adam, _NUMBERS)


@define_optimizer(*_NUMBERS, by_layer=True)
def BertAdam1(
    lr: NonNegative,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-6,
    weight_decay: NonNegative = 0.01,
    max_grad_norm: Positive = 1.0,
    stacked: Any = None,
) -> Parts:
    """Build `BertAdam` without a schedule, which clips the gradient of each tensor to the norm
    `max_grad_norm`.

    Args:
      lr: learning rate.
      betas: decay rates for the means of gradients and squared gradients.
      eps: added to the root.
      weight_decay: decoupled weight decay, multiplied by the learning rate.
      max_grad_norm: largest gradient norm for a tensor.
    """

    def clip(g: jax.Array, axes: Sequence[int]) -> jax.Array:
        return g * jnp.minimum(max_grad_norm / (trees.norm(g, axes) + 1e-6), 1.0)

    # Each tensor by the norm; optax clips the root mean square of a tensor.
    clip_each = optax.stateless(
        lambda grads, params: jax.tree.map(clip, grads, trees.broadcast_stacked(stacked, grads))
    )
    return [("clip_each_by_norm", clip_each), *_make_uncorrected_adam(lr, betas, eps, weight_decay)]


@define_optimizer(*_NUMBERS)
def TansformerAdamW(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-6,
    weight_decay: NonNegative = 0.0,
    correct_bias: bool = True,
) -> Parts:
    """Build the AdamW of early Transformers versions; the name is spelled as in iMIX.

    Unlike `AdamW`, it adds `eps` before the bias correction and decays the updated parameters.

    Args:
      lr, betas, eps, weight_decay: see `BertAdam1`.
      correct_bias: whether to apply the bias correction.
    """
    return [
        ("scale_by_transformers_adam", scale_by_transformers_adam(*betas, eps, correct_bias)),
        ("scale_by_learning_rate", scale_by_group_learning_rate(lr)),
        # Last, with the new parameters: the decay of that version of transformers comes after the
        # step, not before it.
        ("decay_updated_params", decay_updated_params(lr, weight_decay)),
    ]


def _make_bert_adam(
    lr: PerParameter,
    betas: tuple[Scalar, Scalar],
    eps: Scalar,
    weight_decay: PerParameter,
    warmup: float,
    t_total: int,
    schedule: str,
) -> Parts:
    parts = _make_uncorrected_adam(lr, betas, eps, weight_decay)
    if t_total == -1:
        return parts
    factor = functools.partial(_compute_factor, warmup=warmup, t_total=t_total, schedule=schedule)
    return [*parts, ("scale_by_schedule", optax.scale_by_schedule(factor))]


def _make_uncorrected_adam(
    lr: PerParameter, betas: tuple[Scalar, Scalar], eps: Scalar, weight_decay: PerParameter
) -> Parts:
    """Return Adam without bias correction and with decoupled decay."""
    scale = [
        ("scale_by_transformers_adam", scale_by_transformers_adam(*betas, eps, correct_bias=False))
    ]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=True)


def scale_by_transformers_adam(
    b1: Scalar, b2: Scalar, eps: Scalar, correct_bias: bool
) -> optax.GradientTransformation:
    """Rescale gradients by Adam.

    Unlike `optax.scale_by_adam`, eps is added before the optional bias correction.
    """

    def rescale(count: jax.Array, grads: Updates, mu: Updates, nu: Updates) -> tuple[Updates]:
        # eps before the correction, unlike torch's AdamW: with small squares the steps differ
        # visibly.
        updates = jax.tree.map(lambda m, v: m / (jnp.sqrt(v) + eps), mu, nu)
        if correct_bias:
            factor = jnp.sqrt(common.bias_correction(b2, count)) / common.bias_correction(b1, count)
            updates = jax.tree.map(lambda u: factor * u, updates)
        return (updates,)

    return scale_by_moments(b1, b2, rescale)


def decay_updated_params(
    learning_rate: PerParameter, weight_decay: PerParameter
) -> optax.GradientTransformation:
    """Decay the updated parameters.

    `optax.add_decayed_weights` decays the parameters before the update.

    Both arguments are numbers, or trees of numbers like the parameters.
    """

    def update(updates: Updates, params: Any) -> Any:
        params = trees.require_params("TansformerAdamW", params)
        rates = broadcast_to_params(learning_rate, params)
        decays = broadcast_to_params(weight_decay, params)
        return jax.tree.map(
            lambda u, p, lr, decay: u - lr * decay * (p + u), updates, params, rates, decays
        )

    return optax.stateless(update)


def _compute_factor(steps: jax.Array, warmup: float, t_total: int, schedule: str) -> jax.Array:
    """Return the schedule factor after `steps` updates.

    With a warm-up, it is 0 for the first update.
    """
    fraction = steps.astype(jnp.float32) / t_total
    if schedule == "warmup_linear":
        factor = jnp.maximum((fraction - 1) / (warmup - 1), 0.0)
    elif schedule == "warmup_cosine":
        factor = 0.5 * (1 + jnp.cos(jnp.pi * fraction))
    else:
        factor = jnp.ones((), jnp.float32)
    # `warmup` is a constant here, so that Python decides whether there is one; -1 means none.
    return jnp.where(fraction < warmup, fraction / warmup, factor) if warmup > 0 else factor
