"""Schedule rules, pure functions of a counter.

At each step a schedule applies an affine map to the current value of a parameter group,

    value -> a * value + b * target + c * initial

where `initial` is the group's initial value, `target` is a group constant (for example a cosine's minimum), and
`(a, b, c)` depend on the step only. Schedules that multiply the current value can be chained; schedules that set the
value have `a = 0`. A rule is a frozen dataclass: the fields are the settings in a config, and `bind` returns the
function from the step to `(a, b, c)`.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from jengine.annotations import Fraction, NonNegative, Positive
from jengine.errors import ConfigError

Affine = tuple[float, float, float]  # (a, b, c): the weights of the current value, the target and the initial value
INF = 10**9  # MMEngine's "no end"; a conversion to iterations leaves it unchanged
StepFunction = Callable[[int], Affine | None]  # from the number of steps since `begin`; None keeps the value


class ScheduleSettings:
    """Settings of a schedule family, the fields of a frozen dataclass.

    `epoch_units` names the settings that count steps, which a conversion from epochs to iterations scales; None if the
    family cannot be converted.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the settings by name, as JSON-serializable values."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def max_checked(self) -> int:
        """Return the number of steps whose values may be computed before training."""
        return 2**31

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Return an object with the settings in a `state_dict`; other entries are ignored."""
        names = inspect.signature(type(self)).parameters
        return type(self)(**{name: value for name, value in state.items() if name in names})


@dataclasses.dataclass(frozen=True)
class Rule(ScheduleSettings):
    """Pure function of the step, with settings: how a value changes at each step.

    >>> change = StepRule(step_size=2, gamma=0.5).bind(num_steps=10)
    >>> [change(step) for step in range(3)]
    [None, None, (0.5, 0.0, 0.0)]
    """

    def bind(self, num_steps: int) -> StepFunction:
        """Return the function from the step, counted from `begin`, to the change of the value.

        Args:
          num_steps: the number of steps from `begin` to `end`; the last step is `num_steps - 1`.
        """
        raise NotImplementedError

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return the target of each group.

        Args:
          initial_values: the initial value of each group.
          reference: the initial value in the optimizer's own settings, before any group multiplier.
        """
        return [0.0] * len(initial_values)

    def initial_values(self, values: Sequence[float]) -> list[float]:
        """Return the initial value of each group: `values`, unless the rule sets the initial values itself."""
        return list(values)

    def frozen_steps(self, num_steps: int) -> int:
        """Return the number of steps at the start for which a warm-up from 0 sets 0 and hides the value."""
        return 0

    def min_value(self) -> float:
        """Return the lower bound of the values that the rule sets."""
        return float("-inf")


class MinimumRule(Rule):
    """Rule that moves the value to a minimum: `eta_min`, or the fraction `eta_min_ratio` of each initial value."""

    eta_min: float | None
    eta_min_ratio: float | None = None

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return the minimum of each group."""
        minimum, ratio = self.eta_min or 0.0, self.eta_min_ratio
        return [minimum if ratio is None else initial * ratio for initial in initial_values]


def sorted_milestones(name: str, value: Sequence[float]) -> tuple[float, ...]:
    """Return `value` as a tuple; raise ConfigError unless it is in ascending order."""
    if list(value) != sorted(value):
        raise ConfigError(f"`{name}` must be in ascending order, got {list(value)}")
    return tuple(value)


@dataclasses.dataclass(frozen=True)
class ConstantRule(Rule):
    """Multiply the value by `factor` until the last step, which restores it.

    Attributes:
      factor: multiplies the initial value.
    """

    factor: Fraction = 1.0 / 3

    def bind(self, num_steps: int) -> StepFunction:
        """Return the changes at the first and the last step; they cancel if these are the same step."""
        last = num_steps - 1
        if last == 0:
            return lambda t: None
        if self.factor == 0.0:
            # No product restores a value that was multiplied by 0: it is hidden instead, see `Frozen`.
            return lambda t: (1.0, 0.0, 0.0) if t in (0, last) else None
        # Relative changes and not absolute values, so that other schedules in the chain keep their effect.
        changes = {0: (self.factor, 0.0, 0.0), last: (1.0 / self.factor, 0.0, 0.0)}
        return changes.get

    def frozen_steps(self, num_steps: int) -> int:
        """Return all steps but the last if the factor is 0."""
        return num_steps - 1 if self.factor == 0.0 else 0


@dataclasses.dataclass(frozen=True)
class LinearRule(Rule):
    """Multiply the value by a factor that changes linearly from `start_factor` to `end_factor` at the last step.

    Attributes:
      start_factor: multiplies the initial value at the first step.
      end_factor: multiplies it at the last step.
    """

    start_factor: Fraction = 1.0 / 3
    end_factor: Fraction = 1.0

    def bind(self, num_steps: int) -> StepFunction:
        """Return the ratio of each factor to the previous one; with a single step, `end_factor`."""
        last, start, rise = num_steps - 1, self.start_factor, self.end_factor - self.start_factor
        if last == 0:
            return lambda t: (self.end_factor, 0.0, 0.0)

        def change(t: int) -> Affine | None:
            if t == 0:
                return (start or 1.0, 0.0, 0.0)  # from 0 the value is frozen, not multiplied: it must be restored
            # Both factors times `last`, whose ratio has no division by it.
            previous = last * start + (t - 1) * rise
            return ((previous + rise) / (previous or last), 0.0, 0.0)

        return change

    def frozen_steps(self, num_steps: int) -> int:
        """Return 1 if the line starts at 0 and has more than one step."""
        return 1 if self.start_factor == 0.0 and num_steps > 1 else 0


@dataclasses.dataclass(frozen=True)
class StepRule(Rule):
    """Multiply the value by `gamma` every `step_size` steps.

    Attributes:
      step_size: steps between two changes.
      gamma: multiplies the value at each change.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("step_size",)
    step_size: Positive
    gamma: NonNegative = 0.1

    def bind(self, num_steps: int) -> StepFunction:
        """Return the changes at the positive multiples of `step_size`."""
        size, decay = self.step_size, (self.gamma, 0.0, 0.0)
        return lambda t: decay if t > 0 and t % size == 0 else None


@dataclasses.dataclass(frozen=True)
class MultiStepRule(Rule):
    """Multiply the value by `gamma` at each milestone, counted from `begin`; a repeated milestone counts twice.

    Attributes:
      milestones: the steps that change the value, in ascending order.
      gamma: multiplies the value at each change.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("milestones",)
    milestones: Sequence[NonNegative]
    gamma: NonNegative = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", sorted_milestones("milestones", self.milestones))

    def bind(self, num_steps: int) -> StepFunction:
        """Return the changes at the milestones."""
        # As in PyTorch, whose MultiStepLR counts milestones.
        counts = collections.Counter(self.milestones)
        return {milestone: (self.gamma**count, 0.0, 0.0) for milestone, count in counts.items()}.get


@dataclasses.dataclass(frozen=True)
class ExponentialRule(Rule):
    """Multiply the value by `gamma` at every step but the first.

    Attributes:
      gamma: multiplies the value at each step.
    """

    gamma: NonNegative

    def bind(self, num_steps: int) -> StepFunction:
        """Return the same change for each step."""
        decay = (self.gamma, 0.0, 0.0)
        return lambda t: decay if t > 0 else None


@dataclasses.dataclass(frozen=True)
class PolyRule(MinimumRule):
    """Decay the value as a power of the remaining steps, to `eta_min` at the last step.

    Attributes:
      eta_min: value at the last step.
      power: exponent for the remaining fraction.
    """

    eta_min: NonNegative = 0.0
    power: NonNegative = 1.0

    def bind(self, num_steps: int) -> StepFunction:
        """Return how the distance to `eta_min` shrinks at each step."""
        last, power = num_steps - 1, self.power

        def change(t: int) -> Affine | None:
            if t == 0:
                return None
            # ((last - t) / (last - t + 1))**power, the quotient of two neighbouring values of the closed form.
            ratio = (1.0 - 1.0 / (last - t + 1)) ** power
            return (ratio, 1.0 - ratio, 0.0)

        return change


@dataclasses.dataclass(frozen=True)
class PolyRatioRule(PolyRule):
    """Decay like `PolyRule`, to a minimum that may be a fraction of each initial value (MMSegmentation).

    Attributes:
      eta_min_ratio: value at the last step as a fraction of the initial one; replaces `eta_min`.
    """

    eta_min_ratio: NonNegative | None = None


@dataclasses.dataclass(frozen=True)
class QuadraticWarmupRule(Rule):
    """Increase the value as the square of the step, to the initial value at the last step (MMDetection)."""

    def bind(self, num_steps: int) -> StepFunction:
        """Return increments `(2t + 1) / num_steps**2`, as a fraction; raise ConfigError without an end."""
        if num_steps >= INF:
            raise ConfigError("`end` must be given for a quadratic warm-up, got no end")

        def change(t: int) -> Affine:
            # (t + 1)**2 - t**2 = 2t + 1; the first step sets the value, later ones add to it.
            return (0.0 if t == 0 else 1.0, 0.0, (2 * t + 1) / num_steps**2)

        return change
