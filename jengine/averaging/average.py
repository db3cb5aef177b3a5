"""The rule that all averages share: two pure functions and a state.

The first update copies; later ones move the average towards the new value by a weight, which is all that tells one
kind from another. Everything is arithmetic on arrays, so an average runs under `jit`, `vmap`, `scan` and `shard_map`
and costs one pass over the parameters.
"""

import abc
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp

from jengine.registry import Registry

PyTree = Any

AVERAGES = Registry("kind of average", "jengine.averaging")


class AverageState(NamedTuple):
    """What an average carries from one update to the next."""

    params: PyTree  # like the parameters; floating leaves narrower than 32 bits are float32
    steps: jax.Array  # int32[], updates done


class Average(abc.ABC):
    """An average of a pytree of arrays over its updates.

    Of updates counted from 0 the first copies; a later one, number `s`, moves the average by `weight(s)` towards the
    new value if `s` is a multiple of `interval`, else leaves it. Leaves that are not floating are copied each time.

    Attributes:
      interval: updates from one that moves the average to the next.
    """

    interval: int

    @abc.abstractmethod
    def weight(self, steps: jax.Array) -> jax.Array:
        """The weight of the new value, f32[], in update number `steps`, int32[] of at least 1."""

    def for_run(self, total_steps: int) -> Self:
        """This average for a run of `total_steps` updates: itself, unless its weight depends on their number."""
        return self

    def init(self, params: PyTree) -> AverageState:
        """The state before the first update.

        Args:
          params: pytree of arrays.

        Returns:
          A state whose `params` are copies in buffers of their own, so that both may be donated to one call.
        """
        return AverageState(
            params=jax.tree.map(lambda leaf: jnp.array(leaf, dtype=_state_dtype(leaf), copy=True), params),
            steps=jnp.zeros((), jnp.int32),
        )

    def update(self, state: AverageState, params: PyTree) -> AverageState:
        """One update. Pure.

        Args:
          state: from `init` or the update before.
          params: the new value, a pytree of the same structure and shapes.
        """
        first = state.steps == 0
        due = state.steps % self.interval == 0 if self.interval > 1 else None  # None: always
        weight = self.weight(state.steps)

        def move(average: jax.Array, new: jax.Array) -> jax.Array:
            """One average moved towards its value, or a copy of the value."""
            if not jnp.issubdtype(average.dtype, jnp.inexact):
                return jnp.array(new, copy=True)
            new = jnp.asarray(new, average.dtype)
            moved = average + weight.astype(average.dtype) * (new - average)
            # Selected, not blended: a copy is exact, and what is not due stays bit for bit.
            return jnp.where(first, new, moved if due is None else jnp.where(due, moved, average))

        return AverageState(params=jax.tree.map(move, state.params, params), steps=state.steps + 1)


def _state_dtype(leaf: Any) -> Any:
    """Float32 where updates of a thousandth would be lost in fewer bits, else the leaf's own dtype."""
    dtype = jnp.asarray(leaf).dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.float32 if narrow else dtype
