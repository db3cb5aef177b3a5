"""Helpers of the optimizers: accurate moving averages, and the parts that most chains share.

States are float32 at least, whatever the dtype of the parameters, as in PyTorch's mixed precision.
"""

import math
from collections.abc import Sequence
from typing import TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from optax import Updates

from jengine.optim.transforms.groups import (
    PerParameter,
    add_decayed_weights_by_rule,
    scale_by_group_learning_rate,
)

Scalar: TypeAlias = float | jax.Array  # a Python number, or float[] while a step is traced
Parts: TypeAlias = Sequence[tuple[str, optax.GradientTransformation]]


def state_dtype(dtype: jax.typing.DTypeLike) -> np.dtype:
    """Return the state dtype for a parameter dtype: float32, or the same if it is wider."""
    return jnp.promote_types(jnp.float32, dtype)


def upcast(tree: Updates) -> Updates:
    """Return `tree` with at least float32 precision."""
    return jax.tree.map(lambda x: jnp.asarray(x, state_dtype(x.dtype)), tree)


def strip_weak_types(tree: Updates) -> Updates:
    """Return `tree` with strongly typed arrays.

    Weak types come from Python numbers (`jnp.full(3, 0.5)`).

    >>> strip_weak_types(jnp.full(3, 0.5)).weak_type
    False
    """
    return jax.tree.map(
        lambda x: jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x, tree
    )


def zeros_like(tree: Updates) -> Updates:
    """Return zeros with the shapes and shardings of `tree`, at least float32."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=state_dtype(x.dtype)), tree)


def zero_count() -> jax.Array:
    """Return the initial update count, int32[]."""
    return jnp.zeros((), jnp.int32)


def bias_correction(beta: Scalar, count: jax.Array) -> jax.Array:
    """Return `1 - beta**count`, accurate in float32, in which the plain formula loses five digits.

    Args:
      beta: decay, float32[], or a float.
      count: number of this update, starting at 1, int32[].
    """
    log = math.log(beta) if isinstance(beta, float) else jnp.log(beta)
    return -jnp.expm1(count.astype(jnp.result_type(jnp.float32, beta)) * log)


def moving_average(previous: Updates, beta: Scalar, new: Updates) -> Updates:
    """Return the exponential moving average `beta * previous + (1 - beta) * new`."""
    # This form and not the sum of two products: where the average equals the new value, it stays
    # exactly the same.
    return jax.tree.map(lambda m, x: m + (1 - beta) * (x - m), previous, new)


def moving_average_of_squares(previous: Updates, beta: Scalar, new: Updates) -> Updates:
    """Return the exponential moving average of the squares `new**2`."""
    # A sum of terms that are not negative: nothing cancels before the root.
    return jax.tree.map(lambda v, x: beta * v + (1 - beta) * x * x, previous, new)


def is_zero(value: PerParameter) -> bool:
    """Return whether a setting is the constant 0, not an array."""
    return isinstance(value, int | float) and value == 0


def ascent_parts(maximize: bool) -> Parts:
    """Return the part that flips gradients for `maximize=True`, else no part."""
    return [("ascent", optax.scale(-1.0))] if maximize else []


def chain_with_decay(
    scale: Parts,
    lr: PerParameter,
    weight_decay: PerParameter,
    *,
    decoupled: bool,
    maximize: bool = False,
) -> Parts:
    """Return the usual chain: coupled decay before `scale`, or decoupled decay after it, and the
    learning rate.
    """
    # No part rather than one that adds zero: without it the optimizer does not need the parameters
    # in `update`.
    decay = (
        []
        if is_zero(weight_decay)
        else [("add_decayed_weights", add_decayed_weights_by_rule(weight_decay))]
    )
    rate = ("scale_by_learning_rate", scale_by_group_learning_rate(lr))
    ascent = ascent_parts(maximize)
    # Coupled decay goes through the moments (L2, as torch.optim.Adam); decoupled decay is only
    # multiplied with the rate.
    return [*ascent, *scale, *decay, rate] if decoupled else [*ascent, *decay, *scale, rate]
