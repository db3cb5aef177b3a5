"""Parameter averages: two pure functions, `init` and `update`, and a state.

The first update copies the parameters; later ones move the average towards them by a weight.
Subclasses differ only in this weight, and raise ArgumentError or TypeError for an illegal argument.
In all of them, `momentum` is the weight of the NEW value: 0.0002 is a decay of 0.9998. `init` and
`update` are array operations, so they run under `jit`, `vmap`, `scan` and `shard_map`.
"""

import abc
import dataclasses
import warnings
from typing import Annotated, Any, NamedTuple, Self

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from jengine.config.annotations import Count, Range
from jengine.config.registry import Registry

AVERAGES: Registry = Registry("average", "jengine.train", section="AVERAGES")
Weight = Annotated[float, Range(gt=0, lt=1)]


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


class MomentumAverage(Average):
    """Base class for averages with a `momentum`, which warns of one that is most probably a
    decay.
    """

    momentum: float

    def __post_init__(self) -> None:
        # In most papers and in optax, the number is a decay, the weight of the old value.
        if self.momentum > 0.5:
            warnings.warn(
                f"{type(self).__name__}: momentum={self.momentum:g} is the weight of the new "
                "value, which is usually "
                f"small; for a decay of {self.momentum:g} set momentum={1 - self.momentum:g}",
                stacklevel=3,
            )


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class ExponentialMovingAverage(MomentumAverage):
    """Exponential average: `average += momentum * (new - average)`.

    >>> average = ExponentialMovingAverage(momentum=0.25)
    >>> state = average.init({"w": jnp.zeros(())})
    >>> for value in (0.0, 4.0):
    ...     state = average.update(state, {"w": jnp.array(value)})
    >>> state.params["w"].item(), state.steps.item()
    (1.0, 2)

    Args:
      momentum: new value's weight, in (0, 1).
      interval: the average is updated every `interval` updates.
    """

    momentum: Weight = 2e-4
    interval: Count = 1

    def weight(self, steps: jax.Array) -> jax.Array:
        """Return `momentum`."""
        # `float` is float32 unless `jax_enable_x64` is set.
        return jnp.asarray(self.momentum, float)


def _state_dtype(leaf: ArrayLike) -> jnp.dtype:
    """Return float32 for narrower floats, in which small updates would be rounded away, else the
    leaf's dtype.
    """
    dtype = jnp.asarray(leaf).dtype
    narrow = jnp.issubdtype(dtype, jnp.floating) and dtype.itemsize < 4
    return jnp.dtype(jnp.float32) if narrow else dtype
