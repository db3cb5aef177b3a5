"""Parameter averages: two pure functions, `init` and `update`, and a state.

The first update copies the parameters; later ones move the average towards them by a weight.
Subclasses differ only in this weight. `init` and `update` are array operations, so they run under
`jit`, `vmap`, `scan` and `shard_map`.
"""

import abc
from typing import Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jengine.config.registry import Registry

AVERAGES: Registry = Registry("average", "jengine.train", section="AVERAGES")


class AverageState(NamedTuple):
    """What an average keeps between updates."""

    # averages, like the parameters; floating leaves narrower than 32 bits are float32
    params: Any
    steps: jax.Array  # int32[], updates so far


class Average(abc.ABC):
    """Base class for averages of a pytree over updates.

    Update 0 copies the parameters. Update `s > 0` moves the average by `weight(s)` towards the new
    value if `s` is a multiple of `interval`, and has no effect otherwise. Non-floating leaves are
    copied at every update.

    Attributes:
      interval: the average is updated every `interval` updates.
    """

    interval: int

    @abc.abstractmethod
    def weight(self, steps: jax.Array) -> jax.Array:
        """Return the weight of the new value, f32[], in update number `steps`, int32[], which is
        at least 1.
        """

    def with_total_steps(self, total_steps: int) -> Self:
        """Return the average for a run with `total_steps` updates.

        `self` unless the weight depends on this number.
        """
        return self

    def init(self, params: Any) -> AverageState:
        """Return the state before the first update, with copies: it may be donated together with
        `params`.
        """
        return AverageState(
            params=jax.tree.map(
                lambda leaf: jnp.array(leaf, dtype=_state_dtype(leaf), copy=True), params
            ),
            steps=jnp.zeros((), jnp.int32),
        )

    def update(self, state: AverageState, params: Any) -> AverageState:
        """Return the state after one update with new `params`, a pytree with the same structure
        and shapes.
        """
        first = state.steps == 0
        is_due = state.steps % self.interval == 0 if self.interval > 1 else None  # None: always
        # Computed at step 0 too, where it is not used: a scalar costs less than a branch.
        weight = self.weight(state.steps)

        def move(average: jax.Array, new: jax.Array) -> jax.Array:
            """Return the average moved towards the new value, or a copy of the value."""
            # A mean of counters or keys means nothing.
            if not jnp.issubdtype(average.dtype, jnp.inexact):
                return jnp.array(new, copy=True)
            # Widened first: a difference in bfloat16 would round small steps to 0.
            new = jnp.asarray(new, average.dtype)
            moved = average + weight.astype(average.dtype) * (new - average)
            # Selected, not blended: a copy is exact, and an average that is not due does not change
            # by a single bit.
            return jnp.where(
                first, new, moved if is_due is None else jnp.where(is_due, moved, average)
            )

        return AverageState(params=jax.tree.map(move, state.params, params), steps=state.steps + 1)


def _state_dtype(leaf: ArrayLike) -> jnp.dtype:
    """Return float32 for narrower floats, in which small updates would be rounded away, else the
    leaf's dtype.
    """
    dtype = jnp.asarray(leaf).dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype
