"""Schedule formulas, pure functions of a counter.

At each step a schedule applies an affine map to the current value of a parameter group,

    value -> a * value + b * target + c * initial

where `initial` is the group's initial value, `target` is a group constant (for example a cosine's
minimum), and `(a, b, c)` depend on the step only. Schedules that multiply the current value can be
chained; schedules that set the value have `a = 0`. A formula is a frozen dataclass: the fields are
the settings in a config, and `changes` returns `(a, b, c)` for many steps at once.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, ClassVar, TypeAlias

import numpy as np

from jengine.config.annotations import Fraction, NonNegative, Positive
from jengine.config.errors import ArgumentError, ConfigError

Steps: TypeAlias = np.ndarray  # int64[n], steps since `begin`
# (a, b, c), float64[n] each: the weights of the current value, the target and the initial value
Changes: TypeAlias = tuple[np.ndarray, np.ndarray, np.ndarray]
INF = 10**9  # MMEngine's "no end"; a conversion to iterations leaves it unchanged
# The factor 0 of a warm-up: 0 in float32 on the device, and a power of 2, so that the quotient by
# it is exact.
OFF = 2.0**-512


def map_floats(function: Callable[..., float], *columns: Iterable[Any]) -> np.ndarray:
    """Return `function` of each row as float64[n].

    It calls functions of `math`: those of NumPy may round differently, and differently for other
    array sizes, so that a value that is computed later would not be the one that was used in
    training.
    """
    return np.fromiter(map(function, *columns), np.float64)


def keep(steps: Steps) -> Changes:
    """Return changes that keep the value at each step, which a formula then modifies."""
    return np.ones(len(steps)), np.zeros(len(steps)), np.zeros(len(steps))


def towards_target(ratio: np.ndarray) -> Changes:
    """Return changes that multiply the distance to the target by `ratio`, float64[n]."""
    return ratio, 1.0 - ratio, np.zeros(len(ratio))


@dataclasses.dataclass(frozen=True)
class Formula:
    """Pure function of the step, with settings: how a value changes at each step.

    `epoch_units` names the settings that count steps, which a conversion from epochs to iterations
    scales; None if the formula cannot be converted. `is_alone` tells that no other schedule may
    change the value in the same steps.

    >>> a, b, c = StepFormula(step_size=2, gamma=0.5).changes(np.arange(5), num_steps=10)
    >>> a.tolist()
    [1.0, 1.0, 0.5, 1.0, 0.5]
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ()
    is_alone: ClassVar[bool] = False
    block = 1024  # the number of steps to compute at once

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the changes at consecutive steps, counted from `begin`.

        Args:
          steps: the steps.
          num_steps: the number of steps from `begin` to `end`; the last step is `num_steps - 1`.
        """
        raise NotImplementedError(f"{type(self).__name__} must define `changes`")

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return the target of each group.

        Args:
          initial_values: the initial value of each group.
          reference: the initial value in the optimizer's own settings, before any group multiplier.
        """
        return [0.0] * len(initial_values)

    def initial_values(self, values: Sequence[float]) -> list[float]:
        """Return the initial value of each group: `values`, unless the formula sets the initial
        values itself.
        """
        return list(values)

    def floor(self) -> float:
        """Return the lower bound of the values that the formula sets."""
        return float("-inf")


class MinimumFormula(Formula):
    """Formula that moves the value to a minimum: `eta_min`, or the fraction `eta_min_ratio` of each
    initial value.
    """

    eta_min: float | None
    eta_min_ratio: float | None = None

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return the minimum of each group."""
        minimum = self.eta_min or 0.0
        ratio = self.eta_min_ratio
        return [minimum if ratio is None else initial * ratio for initial in initial_values]


def sorted_milestones(name: str, value: Sequence[float]) -> tuple[float, ...]:
    """Return `value` as a tuple; raise ConfigError unless it is in ascending order."""
    if list(value) != sorted(value):
        raise ConfigError(f"`{name}` must be in ascending order, got {list(value)}")
    return tuple(value)


@dataclasses.dataclass(frozen=True)
class ConstantFormula(Formula):
    """Multiply the value by `factor` until the last step, which restores it.

    Attributes:
      factor: multiplies the initial value.
    """

    factor: Fraction = 1.0 / 3

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the changes at the first and the last step.

        They cancel if these are the same step.
        """
        a, b, c = keep(steps)
        factor = self.factor or OFF
        if num_steps > 1:
            # Relative changes and not absolute values, so that other schedules in the chain keep
            # their effect.
            a[steps == 0] = factor
            a[steps == num_steps - 1] = 1.0 / factor
        return a, b, c


@dataclasses.dataclass(frozen=True)
class LinearFormula(Formula):
    """Multiply the value by a factor that changes linearly from `start_factor` to `end_factor` at
    the last step.

    Attributes:
      start_factor: multiplies the initial value at the first step.
      end_factor: multiplies it at the last step.
    """

    start_factor: Fraction = 1.0 / 3
    end_factor: Fraction = 1.0

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the ratio of each factor to the previous one; with a single step, `end_factor`."""
        last = num_steps - 1
        start = self.start_factor or OFF
        rise = self.end_factor - self.start_factor
        a, b, c = keep(steps)
        if last == 0:
            a[:] = self.end_factor
            return a, b, c
        # Both factors times `last`, whose ratio has no division by it.
        previous = last * start + (steps - 1) * rise
        a[:] = (previous + rise) / np.where(previous == 0.0, float(last), previous)
        a[steps == 0] = start
        return a, b, c


@dataclasses.dataclass(frozen=True)
class StepFormula(Formula):
    """Multiply the value by `gamma` every `step_size` steps.

    Attributes:
      step_size: steps between two changes.
      gamma: multiplies the value at each change.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("step_size",)
    step_size: Positive
    gamma: NonNegative = 0.1

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the changes at the positive multiples of `step_size`."""
        a, b, c = keep(steps)
        a[(steps > 0) & (steps % self.step_size == 0)] = self.gamma
        return a, b, c


@dataclasses.dataclass(frozen=True)
class MultiStepFormula(Formula):
    """Multiply the value by `gamma` at each milestone, counted from `begin`.

    A repeated milestone counts twice.

    Attributes:
      milestones: the steps that change the value, in ascending order.
      gamma: multiplies the value at each change.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("milestones",)
    milestones: Sequence[NonNegative]
    gamma: NonNegative = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", sorted_milestones("milestones", self.milestones))

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the changes at the milestones."""
        a, b, c = keep(steps)
        milestones = np.asarray(self.milestones, np.float64)
        # As in PyTorch, whose MultiStepLR counts milestones.
        counts = np.searchsorted(milestones, steps, "right") - np.searchsorted(
            milestones, steps, "left"
        )
        at = np.flatnonzero(counts)
        a[at] = [self.gamma**count for count in counts[at].tolist()]
        return a, b, c


@dataclasses.dataclass(frozen=True)
class ExponentialFormula(Formula):
    """Multiply the value by `gamma` at every step but the first.

    Attributes:
      gamma: multiplies the value at each step.
    """

    gamma: NonNegative

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the same change for each step but the first."""
        a, b, c = keep(steps)
        a[steps > 0] = self.gamma
        return a, b, c


@dataclasses.dataclass(frozen=True)
class PolyFormula(MinimumFormula):
    """Decay the value as a power of the remaining steps, to `eta_min` at the last step.

    Attributes:
      eta_min: value at the last step.
      power: exponent for the remaining fraction.
    """

    eta_min: NonNegative = 0.0
    power: NonNegative = 1.0

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return how the distance to `eta_min` shrinks at each step."""
        # ((last - t) / (last - t + 1))**power, the quotient of two neighbouring values of the
        # closed form.
        base = 1.0 - 1.0 / np.maximum(num_steps - steps, 1)
        ratio = map_floats(pow, base.tolist(), itertools.repeat(self.power))
        ratio[steps == 0] = 1.0
        return towards_target(ratio)


@dataclasses.dataclass(frozen=True)
class CosineAnnealingFormula(MinimumFormula):
    """Anneal along half a cosine from the value at `begin` to the minimum in `T_max` steps, then
    back up.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the
    restarts.

    Attributes:
      T_max: steps to the minimum; the whole schedule by default.
      eta_min: the minimum; 0 by default.
      eta_min_ratio: the minimum as a fraction of the initial value, instead of `eta_min`.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("T_max",)
    T_max: Positive | None = None
    eta_min: NonNegative | None = None
    eta_min_ratio: NonNegative | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.eta_min is not None and self.eta_min_ratio is not None:
            raise ArgumentError(
                "`eta_min` must be None if `eta_min_ratio` is given, got "
                f"eta_min={self.eta_min} and eta_min_ratio={self.eta_min_ratio}"
            )

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return ratios to the previous value.

        An increment after the minimum, where the ratio is undefined.
        """
        length = num_steps if self.T_max is None else self.T_max
        step = math.pi / length
        # The closed form (1 + cos) / 2 at this step over that at the last one, as in PyTorch's
        # chainable form.
        a, b, c = towards_target(cosine_ratios(step, steps))
        # the distance to it is 0, and so no ratio helps
        at_minimum = (steps - 1 - length) % (2 * length) == 0
        rebound = (1.0 - math.cos(step)) / 2.0
        a[at_minimum] = 1.0
        b[at_minimum] = -rebound
        c[at_minimum] = rebound
        a[steps == 0] = 1.0
        b[steps == 0] = 0.0
        c[steps == 0] = 0.0
        return a, b, c


def cosine_ratios(step: float, steps: np.ndarray) -> np.ndarray:
    """Return `(1 + cos(step * t)) / (1 + cos(step * (t - 1)))` at consecutive steps.

    Infinite by a 0.
    """
    heights = 1.0 + map_floats(math.cos, (step * np.append(steps[:1] - 1, steps)).tolist())
    with np.errstate(divide="ignore", invalid="ignore"):
        return heights[1:] / heights[:-1]
