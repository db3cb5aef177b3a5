"""Logits that a loss computes in chunks of tokens, so that those of all tokens never exist at
once.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jengine.extras.networks.constrain import BATCH, CONTEXT, constrain
from jengine.model.losses import LazyLogits


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class ChunkedLogits(LazyLogits):
    """Logits of many tokens as a product that is not computed yet, `hidden @ kernel`.

    A module may return them for the loss, which calls `map_tokens`. In the backward pass the logits
    of a chunk are computed again. A chunk has tokens at equal distances, so it is as sharded as all
    tokens are.

    Attributes:
      hidden: f[B, T, D].
      kernel: f[D, V].
      size: number of tokens of each example in a chunk, which divides T.
      dtype: that of the product.
      cap: see `cap_values`.
    """

    hidden: jax.Array
    kernel: jax.Array
    size: int = dataclasses.field(metadata=dict(static=True))
    dtype: Any = dataclasses.field(metadata=dict(static=True))
    cap: float | None = dataclasses.field(default=None, metadata=dict(static=True))

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of all logits, [B, T, V]."""
        return (*self.hidden.shape[:-1], self.kernel.shape[-1])

    def map_tokens(self, fn: Callable[..., jax.Array], *arrays: ArrayLike) -> jax.Array:
        """Return `fn(logits, *arrays)`, a number for each token, chunk by chunk.

        >>> logits = ChunkedLogits(jnp.ones((1, 4, 2)), jnp.ones((2, 8)), size=2, dtype=jnp.float32)
        >>> logits.map_tokens(lambda logits: logits.sum(axis=-1))
        Array([[16., 16., 16., 16.]], dtype=float32)

        Args:
          fn: function of logits f[..., V] and the arrays, which returns f[...].
          *arrays: with the leading axes [B, T].
        """
        # Gathered here, and not in each step of the loop; over `tensor` words stay sharded.
        kernel = constrain(self.kernel.astype(self.dtype), None, "tensor")

        def split(x: ArrayLike) -> jax.Array:
            x = jnp.asarray(x)
            return jnp.moveaxis(x.reshape(x.shape[0], self.size, -1, *x.shape[2:]), 2, 0)

        @jax.checkpoint
        def compute(chunk: tuple[jax.Array, ...]) -> jax.Array:
            hidden, *others = chunk
            logits = constrain(hidden @ kernel, BATCH, CONTEXT, "tensor")
            return fn(cap_values(logits, self.cap), *others)

        chunks = tuple(map(split, (self.hidden.astype(self.dtype), *arrays)))
        results = jax.lax.map(compute, chunks)
        return jnp.moveaxis(results, 0, 2).reshape(self.shape[:2])


def cap_values(x: jax.Array, cap: float | None) -> jax.Array:
    """Return `cap * tanh(x / cap)`, which stays within the cap; `x` as it is for None.

    >>> cap_values(jnp.array([0.0, 1e6]), 30.0)
    Array([ 0., 30.], dtype=float32)
    """
    return x if cap is None else cap * jnp.tanh(x / cap)
