"""Clip gradients by their norm as PyTorch does."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class ClipByNormState(NamedTuple):
    """Hold the norm for the log."""

    grad_norm: jax.Array  # float32[], norm of the last gradients before clipping


def clip_by_norm(max_norm: float, norm_type: float = 2.0) -> optax.GradientTransformation:
    """Scale all gradients so that their common p-norm is at most `max_norm`.

    `optax.clip_by_global_norm` knows the 2-norm alone and divides by the norm, PyTorch by the norm plus 1e-6.

    Args:
      max_norm: the largest norm.
      norm_type: the p of the norm; `math.inf` for the largest magnitude.
    """

    def init(params: PyTree) -> ClipByNormState:
        return ClipByNormState(jnp.zeros((), jnp.float32))

    def update(grads: PyTree, state: ClipByNormState, params: PyTree = None) -> tuple[PyTree, ClipByNormState]:
        norm = global_norm(grads, norm_type)
        factor = jnp.minimum(max_norm / (norm + 1e-6), 1.0)
        clipped = jax.tree.map(lambda g: g * factor.astype(g.dtype), grads)
        return clipped, ClipByNormState(norm.astype(jnp.float32))

    return optax.GradientTransformation(init, update)


def global_norm(grads: PyTree, norm_type: float = 2.0) -> jax.Array:
    """Return the norm of all elements of all leaves together, float32[].

    Args:
      grads: pytree of floating arrays.
      norm_type: the p of the p-norm; `math.inf` for the largest magnitude.
    """
    leaves = [jnp.asarray(leaf, jnp.promote_types(jnp.float32, leaf.dtype)) for leaf in jax.tree.leaves(grads)]
    if not leaves:
        return jnp.zeros((), jnp.float32)
    if math.isinf(norm_type):
        return jnp.max(jnp.stack([jnp.max(jnp.abs(leaf), initial=0) for leaf in leaves]))
    if norm_type == 2:
        return jnp.sqrt(sum(jnp.sum(leaf * leaf) for leaf in leaves))
    if norm_type == 1:
        return jnp.asarray(sum(jnp.sum(jnp.abs(leaf)) for leaf in leaves))
    return sum(jnp.sum(jnp.abs(leaf) ** norm_type) for leaf in leaves) ** (1 / norm_type)
