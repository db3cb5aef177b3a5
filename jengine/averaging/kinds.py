"""The kinds of averages. In all of them `momentum` is the weight of the NEW value: 0.0002 is a decay of 0.9998."""

import dataclasses
import math
import warnings
from typing import Self

import jax
import jax.numpy as jnp

from jengine.averaging.average import AVERAGES, Average


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class ExponentialMovingAverage(Average):
    """`average += momentum * (new - average)`.

    Args:
      momentum: weight of the new value, in (0, 1).
      interval: updates from one that moves the average to the next.

    Raises:
      AssertionError: a value out of its range. TypeError: `interval` is no integer.
    """

    momentum: float = 2e-4
    interval: int = 1

    def __post_init__(self) -> None:
        _check_momentum(self)
        _check_interval(self)

    def weight(self, steps: jax.Array) -> jax.Array:
        """`momentum`, always."""
        return jnp.float32(self.momentum)


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class StochasticWeightAverage(Average):
    """The plain mean of what it was updated with (Izmailov et al., 2018, arXiv:1803.05407).

    Args:
      interval: updates from one that moves the average to the next.

    Raises:
      AssertionError: `interval` is below 1. TypeError: it is no integer.
    """

    interval: int = 1

    def __post_init__(self) -> None:
        _check_interval(self)

    def weight(self, steps: jax.Array) -> jax.Array:
        """One over the number of values, the new one included."""
        return 1.0 / (steps // self.interval + 1).astype(jnp.float32)


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class MomentumAnnealingEMA(Average):
    """An exponential average with the weight `max(momentum, gamma / (gamma + steps))`, large while training is young.

    Args:
      momentum: the least weight of the new value, in (0, 1).
      gamma: above 0; the greater, the slower the weight falls.
      interval: updates from one that moves the average to the next.

    Raises:
      AssertionError: a value out of its range. TypeError: `interval` is no integer.
    """

    momentum: float = 2e-4
    gamma: float = 100
    interval: int = 1

    def __post_init__(self) -> None:
        _check_momentum(self)
        _check_gamma(self)
        _check_interval(self)

    def weight(self, steps: jax.Array) -> jax.Array:
        """Falls from 1 to `momentum`."""
        gamma = jnp.float32(self.gamma)
        return jnp.maximum(jnp.float32(self.momentum), gamma / (gamma + steps.astype(jnp.float32)))


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class ExpMomentumEMA(Average):
    """An exponential average with the weight `(1 - momentum) * exp(-(1 + steps) / gamma) + momentum` (MMDetection).

    Args:
      momentum: the weight of the new value that is approached, in (0, 1).
      gamma: above 0; the greater, the slower the weight falls.
      interval: updates from one that moves the average to the next.

    Raises:
      AssertionError: a value out of its range. TypeError: `interval` is no integer.
    """

    momentum: float = 2e-4
    gamma: float = 2000
    interval: int = 1

    def __post_init__(self) -> None:
        _check_momentum(self)
        _check_gamma(self)
        _check_interval(self)

    def weight(self, steps: jax.Array) -> jax.Array:
        """Falls from nearly 1 to `momentum`."""
        decay = jnp.exp(-(1 + steps).astype(jnp.float32) / self.gamma)
        return (1 - self.momentum) * decay + self.momentum


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class CosineEMA(Average):
    """An exponential average whose weight goes from `momentum` to `end_momentum` on half a cosine.

    As in BYOL and DINO; the convention is MMPretrain's, weights of the new value. Where a paper gives the decay 0.996
    that rises to 1, `momentum` is 0.004 and `end_momentum` 0.

    Args:
      momentum: the weight of the new value at the start, in (0, 1).
      end_momentum: the weight at the end, in [0, 1).
      total_steps: updates after which the end is reached; None: those of the run, see `for_run`.
      interval: updates from one that moves the average to the next.

    Raises:
      AssertionError: a value out of its range. TypeError: `interval` or `total_steps` is no integer.
    """

    momentum: float = 0.004
    end_momentum: float = 0.0
    total_steps: int | None = None
    interval: int = 1

    def __post_init__(self) -> None:
        _check_momentum(self)
        if not 0.0 <= self.end_momentum < 1.0:
            raise AssertionError(f"CosineEMA: end_momentum is in [0, 1), found {self.end_momentum!r}")
        if self.total_steps is not None:
            _check_count(self, "total_steps", self.total_steps)
        _check_interval(self)

    def for_run(self, total_steps: int) -> Self:
        """This average with the run's number of updates, unless it has one of its own."""
        return self if self.total_steps is not None else dataclasses.replace(self, total_steps=total_steps)

    def weight(self, steps: jax.Array) -> jax.Array:
        """From `momentum` at 0 to `end_momentum` at `total_steps` and beyond.

        Raises:
          ValueError: `total_steps` is not known.
        """
        if self.total_steps is None:
            raise ValueError("CosineEMA needs total_steps, the number of updates, outside a Runner")
        done = jnp.minimum(steps.astype(jnp.float32) / self.total_steps, 1.0)
        return self.end_momentum - (self.end_momentum - self.momentum) * (jnp.cos(math.pi * done) + 1) / 2


def _check_momentum(average: "ExponentialMovingAverage | MomentumAnnealingEMA | ExpMomentumEMA | CosineEMA") -> None:
    name, momentum = type(average).__name__, average.momentum
    if not 0.0 < momentum < 1.0:
        raise AssertionError(f"{name}: momentum is in (0, 1), found {momentum!r}")
    if momentum > 0.5:
        warnings.warn(
            f"{name}: momentum={momentum:g} is the weight of the new value and usually small; for a decay of "
            f"{momentum:g} give momentum={1 - momentum:g}",
            stacklevel=4,
        )


def _check_gamma(average: "MomentumAnnealingEMA | ExpMomentumEMA") -> None:
    if not average.gamma > 0:
        raise AssertionError(f"{type(average).__name__}: gamma is above 0, found {average.gamma!r}")


def _check_interval(average: Average) -> None:
    _check_count(average, "interval", average.interval)


def _check_count(average: Average, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{type(average).__name__}: {name} is an integer, found {value!r}")
    if value < 1:
        raise AssertionError(f"{type(average).__name__}: {name} is at least 1, found {value}")
