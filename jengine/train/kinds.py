"""The averages. In all of them, `momentum` is the weight of the NEW value: 0.0002 is a decay of
0.9998.

The constructors raise ArgumentError for a value out of its range, and TypeError for one with
another type.
"""

import dataclasses
import warnings
from typing import Annotated

import jax
import jax.numpy as jnp

from jengine.config.annotations import Count, Positive, Range
from jengine.train.average import AVERAGES, Average

Weight = Annotated[float, Range(gt=0, lt=1)]


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


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class StochasticWeightAverage(Average):
    """Average with equal weights (Izmailov et al., 2018, arXiv:1803.05407).

    Args:
      interval: the average is updated every `interval` updates.
    """

    interval: Count = 1

    def weight(self, steps: jax.Array) -> jax.Array:
        """Return one over the number of values, including the new one."""
        # The running mean: new value number n moves the mean of n - 1 values by 1 / n.
        return 1.0 / (steps // self.interval + 1).astype(float)


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class MomentumAnnealingEMA(MomentumAverage):
    """Exponential average with the weight `max(momentum, gamma / (gamma + steps))`, which is large
    early in training.

    Args:
      momentum: the minimum new value's weight, in (0, 1).
      gamma: positive; the larger it is, the more slowly the weight decreases.
      interval: the average is updated every `interval` updates.
    """

    momentum: Weight = 2e-4
    gamma: Positive = 100
    interval: Count = 1

    def weight(self, steps: jax.Array) -> jax.Array:
        """Return a weight that decreases from 1 to `momentum`."""
        # Near step 0 the quotient is near 1, so that the average follows the parameters at first.
        gamma = jnp.asarray(self.gamma, float)
        return jnp.maximum(jnp.asarray(self.momentum, float), gamma / (gamma + steps.astype(float)))
