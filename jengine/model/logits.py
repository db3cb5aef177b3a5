"""Logits that a loss computes in chunks of tokens, so that those of all tokens never exist at
once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jengine.model.constrain import BATCH, CONTEXT, constrain


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkedLogits:
    """Logits of many tokens as a product that is not computed yet, `hidden @ kernel`.

    A module may return them for the loss, which calls `map_tokens`. In the backward pass the logits
    of a chunk are computed again. A chunk has tokens at equal distances, so it is as sharded as all
    tokens are.

    Attributes:
      hidden: f[B, T, D].
      kernel: f[D, V].
      size: number of tokens of each example in a chunk, which divides T.
      dtype: that of the product.
    """

    hidden: jax.Array
    kernel: jax.Array
    size: int = dataclasses.field(metadata=dict(static=True))
    dtype: Any = dataclasses.field(metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all logits, [B, T, V]."""
        return (*self.hidden.shape[:-1], self.kernel.shape[-1])


def map_tokens(
    fn: Callable[..., jax.Array], logits: ArrayLike | ChunkedLogits, *arrays: ArrayLike
) -> jax.Array:
    """Return `fn(logits, *arrays)`, which computes a number for each token.

    For `ChunkedLogits` chunk by chunk.

    >>> logits = ChunkedLogits(jnp.ones((1, 4, 2)), jnp.ones((2, 8)), size=2, dtype=jnp.float32)
    >>> map_tokens(lambda logits: logits.sum(axis=-1), logits)
    Array([[16., 16., 16., 16.]], dtype=float32)

    Args:
      fn: function of logits f[..., V] and the arrays, which returns f[...].
      logits: f[..., V], or not computed yet, f[B, T, V].
      *arrays: with the same leading axes as the logits.
    """
    if not isinstance(logits, ChunkedLogits):
        return fn(logits, *arrays)
    size = logits.size
    dtype = logits.dtype
    # Gathered here, and not in each step of the loop; over `tensor` words stay sharded.
    kernel = constrain(logits.kernel.astype(dtype), None, "tensor")

    def split(x: ArrayLike) -> jax.Array:
        x = jnp.asarray(x)
        return jnp.moveaxis(x.reshape(x.shape[0], size, -1, *x.shape[2:]), 2, 0)

    @jax.checkpoint
    def compute(chunk: tuple[jax.Array, ...]) -> jax.Array:
        hidden, *others = chunk
        return fn(constrain(hidden @ kernel, BATCH, CONTEXT, "tensor"), *others)

    results = jax.lax.map(compute, tuple(map(split, (logits.hidden.astype(dtype), *arrays))))
    return jnp.moveaxis(results, 0, 2).reshape(logits.shape[:2])
