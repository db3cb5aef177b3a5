"""The rules of parameter schedules, as pure functions of a counter.

Whatever a schedule does at one step is an affine map of the current value of a parameter group,

    value -> a * value + p * anchor + q * base

where `base` is the initial value of the group, `anchor` is a constant of the group (the floor that a cosine falls to,
say), and `(a, p, q)` depend on the step alone. That one form serves the schedules that multiply what is there, which
is how several of them chain, and the schedules that set a value outright (`a = 0`). A rule is a frozen dataclass: its
fields are the settings in a config, its `bind` gives the function from the step to `(a, p, q)`.
"""

import collections
import dataclasses
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

from jengine.annotations import Finite, Fraction, NonNegative, Positive
from jengine.errors import ConfigError

Affine = tuple[float, float, float]  # (a, p, q): the weights of the current value, of the anchor and of the base
INF = 10**9  # MMEngine's "no end"; a conversion to iterations leaves it alone
StepFunction = Callable[[int], Affine | None]  # from the step in the window, from 0; None leaves the value alone


class ConflictError(ConfigError, AssertionError):
    """Settings that exclude each other. Also an AssertionError, which is what MMEngine raises for them."""


class Settings:
    """Save and load the settings of one family of schedules, the fields of a frozen dataclass.

    `epoch_units` names the settings that count steps, which a conversion from epochs to iterations scales; None says
    that the family cannot be converted.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return the settings by name. Fits JSON."""
        return {name: list(value) if isinstance(value, tuple) else value for name, value in vars(self).items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> Self:
        """Return an object with the settings of a `state_dict`; other entries of `state` are ignored."""
        names = inspect.signature(type(self)).parameters
        return type(self)(**{name: value for name, value in state.items() if name in names})


@dataclasses.dataclass(frozen=True)
class Rule(Settings):
    """The settings of one family of schedules, and what they do to a value at each step."""

    def bind(self, span: int) -> StepFunction:
        """The function from the step in the window to the change of the value.

        Args:
          span: how many steps the window has, `end - begin`; the last step is `span - 1`.
        """
        raise NotImplementedError

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """The anchor of each group.

        Args:
          bases: the initial value of each group.
          reference: the optimizer's own initial value, before any multiplier of a group.
        """
        return [0.0] * len(bases)

    def initials(self, bases: Sequence[float]) -> list[float]:
        """The initial value of each group under this rule; only a rule that sets them itself changes `bases`."""
        return list(bases)

    def muted_steps(self, span: int) -> int:
        """For how many steps from the start the value shown is 0 although it comes back (a warm-up from 0)."""
        return 0

    def least(self) -> float:
        """The smallest value that the rule ever sets."""
        return float("-inf")


def scale_epochs(settings: Mapping[str, Any], names: Sequence[str], epoch_length: int) -> dict[str, Any]:
    """A copy of `settings` in which the numbers, or lists of them, called `names` are multiplied by `epoch_length`."""
    scaled = dict(settings)
    for name in names:
        if isinstance(scaled.get(name), list | tuple):
            scaled[name] = [item * epoch_length for item in scaled[name]]
        elif scaled.get(name) is not None:
            scaled[name] = scaled[name] * epoch_length
    return scaled


def sorted_milestones(name: str, value: Sequence[float]) -> tuple[float, ...]:
    """Return `value` as a tuple.

    Raises:
      ConfigError: it is not in ascending order.
    """
    if list(value) != sorted(value):
        raise ConfigError(f"`{name}` must be in ascending order, got {list(value)}")
    return tuple(value)


@dataclasses.dataclass(frozen=True)
class ConstantRule(Rule):
    """Multiplies by `factor` until the last step of the window, which restores the value."""

    factor: Fraction = 1.0 / 3

    def bind(self, span: int) -> StepFunction:
        """Changes at the first and the last step; in a window of one step those cancel."""
        last = span - 1
        if last == 0:
            return lambda t: None
        if self.factor == 0.0:
            return lambda t: (1.0, 0.0, 0.0) if t in (0, last) else None
        changes = {0: (self.factor, 0.0, 0.0), last: (1.0 / self.factor, 0.0, 0.0)}
        return changes.get

    def muted_steps(self, span: int) -> int:
        """All but the last step when the factor is 0."""
        return span - 1 if self.factor == 0.0 else 0


@dataclasses.dataclass(frozen=True)
class LinearRule(Rule):
    """Multiplies by a factor that goes in a straight line from `start_factor` to `end_factor` at the last step."""

    start_factor: Fraction = 1.0 / 3
    end_factor: Fraction = 1.0

    def bind(self, span: int) -> StepFunction:
        """The ratio of each factor to the one before it; a window of one step is at its end at once."""
        last, start, rise = span - 1, self.start_factor, self.end_factor - self.start_factor
        if last == 0:
            return lambda t: (self.end_factor, 0.0, 0.0)

        def change(t: int) -> Affine:
            if t == 0:
                return (start or 1.0, 0.0, 0.0)  # from 0 the value is muted, not multiplied: it has to come back
            before = last * start + (t - 1) * rise
            return ((before + rise) / (before or last), 0.0, 0.0)

        return change

    def muted_steps(self, span: int) -> int:
        """The first step, when it starts from 0 and does not stay there."""
        return 1 if self.start_factor == 0.0 and span > 1 else 0


@dataclasses.dataclass(frozen=True)
class StepRule(Rule):
    """Multiplies by `gamma` every `step_size` steps."""

    epoch_units: ClassVar[tuple[str, ...] | None] = ("step_size",)
    step_size: Positive
    gamma: Finite = 0.1

    def bind(self, span: int) -> StepFunction:
        """Changes at the positive multiples of `step_size`."""
        size, drop = self.step_size, (self.gamma, 0.0, 0.0)
        return lambda t: drop if t > 0 and t % size == 0 else None


@dataclasses.dataclass(frozen=True)
class MultiStepRule(Rule):
    """Multiplies by `gamma` at each milestone, counted from `begin`; a milestone given twice counts twice."""

    epoch_units: ClassVar[tuple[str, ...] | None] = ("milestones",)
    milestones: Sequence[NonNegative]
    gamma: Finite = 0.1

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", sorted_milestones("milestones", self.milestones))

    def bind(self, span: int) -> StepFunction:
        """Changes at the milestones."""
        counts = collections.Counter(self.milestones)
        return {milestone: (self.gamma**count, 0.0, 0.0) for milestone, count in counts.items()}.get


@dataclasses.dataclass(frozen=True)
class ExponentialRule(Rule):
    """Multiplies by `gamma` at every step but the first."""

    gamma: Finite

    def bind(self, span: int) -> StepFunction:
        """The same change at each step."""
        decay = (self.gamma, 0.0, 0.0)
        return lambda t: decay if t > 0 else None


@dataclasses.dataclass(frozen=True)
class PolyRule(Rule):
    """Falls as a power of the steps left, to `eta_min` at the last step of the window."""

    eta_min: Finite = 0.0
    power: Finite = 1.0

    def bind(self, span: int) -> StepFunction:
        """The ratio of the distance to `eta_min` to that of the step before."""
        last, power = span - 1, self.power

        def change(t: int) -> Affine | None:
            if t == 0:
                return None
            ratio = (1.0 - 1.0 / (last - t + 1)) ** power
            return (ratio, 1.0 - ratio, 0.0)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """The floor, the same for every group."""
        return [self.eta_min] * len(bases)


@dataclasses.dataclass(frozen=True)
class PolyRatioRule(PolyRule):
    """`PolyRule` whose floor may be a part of each group's initial value (MMSegmentation)."""

    eta_min_ratio: Finite | None = None

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """`eta_min_ratio` of each base, or `eta_min` where no ratio is given."""
        if self.eta_min_ratio is None:
            return super().anchors(bases, reference)
        return [base * self.eta_min_ratio for base in bases]


@dataclasses.dataclass(frozen=True)
class QuadraticWarmupRule(Rule):
    """Rises as the square of the step, to the initial value at the last step of the window (MMDetection)."""

    def bind(self, span: int) -> StepFunction:
        """Adds `(2t + 1) / span**2` of the initial value, from 0; raises ValueError when the window has no end."""
        if span >= INF:
            raise ConfigError("a quadratic warm-up needs its `end`")

        def change(t: int) -> Affine:
            return (0.0 if t == 0 else 1.0, 0.0, (2 * t + 1) / span**2)

        return change
