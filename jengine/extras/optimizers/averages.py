"""Parameter averages of MMEngine, MMDetection and MMPretrain whose weight changes with the step."""

import dataclasses
import math
from typing import Self

import jax
import jax.numpy as jnp

from jengine.config.annotations import Count, Decay, Positive
from jengine.train.average import AVERAGES, Average, MomentumAverage, Weight


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class ExpMomentumEMA(MomentumAverage):
    """Exponential average with the weight `(1 - momentum) * exp(-(1 + steps) / gamma) + momentum`
    (MMDetection).

    Args:
      momentum: the weight's limit, in (0, 1).
      gamma: positive; the larger it is, the more slowly the weight decreases.
      interval: the average is updated every `interval` updates.
    """

    momentum: Weight = 2e-4
    gamma: Positive = 2000
    interval: Count = 1

    def weight(self, steps: jax.Array) -> jax.Array:
        """Return a weight that decreases from nearly 1 to `momentum`."""
        decay = jnp.exp(-(1 + steps).astype(float) / self.gamma)
        return (1 - self.momentum) * decay + self.momentum


@AVERAGES.register_module()
@dataclasses.dataclass(frozen=True)
class CosineEMA(MomentumAverage):
    """Exponential average with a weight that follows half a cosine from `momentum` to
    `end_momentum`.

    BYOL and DINO use this schedule. As in MMPretrain, the values are weights of the new value: for
    a paper's decay that rises from 0.996 to 1, set `momentum` to 0.004 and `end_momentum` to 0.

    Args:
      momentum: the weight of the new value at the start, in (0, 1).
      end_momentum: the weight at the end, in [0, 1).
      total_steps: updates until `end_momentum` is reached; None for the run length.
      interval: the average is updated every `interval` updates.
    """

    momentum: Weight = 0.004
    end_momentum: Decay = 0.0
    total_steps: Count | None = None
    interval: Count = 1

    def with_total_steps(self, total_steps: int) -> Self:
        """Return the average with `total_steps` set, unless it is set already."""
        return (
            self
            if self.total_steps is not None
            else dataclasses.replace(self, total_steps=total_steps)
        )

    def weight(self, steps: jax.Array) -> jax.Array:
        """Return `momentum` at step 0, `end_momentum` from step `total_steps` on, and half a
        cosine in between.
        """
        if self.total_steps is None:
            raise ValueError("CosineEMA: total_steps must be set outside a Runner, got None")
        # A resumed, longer run keeps the last weight instead of following the cosine back up.
        progress = jnp.minimum(steps.astype(float) / self.total_steps, 1.0)
        return (
            self.end_momentum
            - (self.end_momentum - self.momentum) * (jnp.cos(math.pi * progress) + 1) / 2
        )


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
