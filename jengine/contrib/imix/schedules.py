"""Define the learning rate schedules of iMIX; their steps are iterations."""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

from jengine.annotations import Count, CountOrNever, Decay, Finite, Index, NonNegative
from jengine.errors import ConfigError, closest
from jengine.optim.schedules.plateau import PlateauScheduler, PlateauSettings
from jengine.optim.schedules.rules import Rule, StepFunction, sorted_milestones
from jengine.optim.schedules.scheduler import ParamScheduler
from jengine.optim.schedules.variants import make_scheduler


@dataclasses.dataclass(frozen=True)
class FactorRule(Rule):
    """A rule that sets `factor(t)` times the initial value."""

    epoch_units: ClassVar[tuple[str, ...] | None] = None

    def factor(self, t: int) -> float:
        """What the initial value is multiplied by at step `t` of the window."""
        raise NotImplementedError

    def bind(self, span: int) -> StepFunction:
        """Sets the value whatever it was before."""
        return lambda t: (0.0, 0.0, self.factor(t))


def _ramp(t: int, length: int, start: float = 0.0) -> float:
    """From `start` at 0 to 1 at `length`."""
    part = t / max(1, length)
    return start * (1.0 - part) + part


def _warmup(method: str, t: int, length: int, start: float) -> float:
    if t >= length:
        return 1.0
    return start if method == "constant" else _ramp(t, length, start)


def _check_method(method: str, known: Sequence[str]) -> None:
    if method not in known:
        raise ConfigError(f"no warmup_method is called {method!r}{closest(method, known)}")


@dataclasses.dataclass(frozen=True)
class WarmupMultiStepRule(FactorRule):
    """A warm-up times `gamma` to the number of milestones passed."""

    milestones: Sequence[NonNegative]
    gamma: Finite = 0.1
    warmup_factor: NonNegative = 0.001
    warmup_iters: Index = 1000
    warmup_method: Literal["constant", "linear"] = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", sorted_milestones("milestones", self.milestones))

    def factor(self, t: int) -> float:
        """The warm-up factor times the steps."""
        warmup = _warmup(self.warmup_method, t, self.warmup_iters, self.warmup_factor)
        return warmup * self.gamma ** bisect.bisect_right(self.milestones, t)


@dataclasses.dataclass(frozen=True)
class WarmupCosineRule(FactorRule):
    """A warm-up times half a cosine over all of `max_iters`."""

    max_iters: Count
    warmup_factor: NonNegative = 0.001
    warmup_iters: Index = 1000
    warmup_method: Literal["constant", "linear"] = "linear"

    def factor(self, t: int) -> float:
        """The warm-up factor times the cosine."""
        warmup = _warmup(self.warmup_method, t, self.warmup_iters, self.warmup_factor)
        return warmup * 0.5 * (1.0 + math.cos(math.pi * t / self.max_iters))


@dataclasses.dataclass(frozen=True)
class PythiaRule(FactorRule):
    """A linear warm-up, up to and with step `warmup_iterations`, then `lr_ratio` to the number of `lr_steps` passed."""

    lr_steps: Sequence[NonNegative]
    lr_ratio: Finite
    warmup_iterations: Index = 0
    warmup_factor: NonNegative = 0.0
    use_warmup: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr_steps", sorted_milestones("lr_steps", self.lr_steps))

    def factor(self, t: int) -> float:
        """The warm-up first, the steps after it."""
        if self.use_warmup and self.warmup_iterations > 0 and t <= self.warmup_iterations:
            return _ramp(t, self.warmup_iterations, self.warmup_factor)
        return self.lr_ratio ** bisect.bisect_right(self.lr_steps, t)


@dataclasses.dataclass(frozen=True)
class PythiaMultiStepRule(PythiaRule):
    """`PythiaRule` whose warm-up must be over before the first of `lr_steps`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_warmup and self.warmup_iterations >= self.lr_steps[0]:
            raise AssertionError(
                f"the warm-up of {self.warmup_iterations} iterations is over before the first of lr_steps, "
                f"{self.lr_steps[0]}"
            )


@dataclasses.dataclass(frozen=True)
class WarmupLinearNonZeroRule(FactorRule):
    """Linear up and linear down, never below `min_lr`, not even at step 0. `use_warmup` has no effect, as in iMIX."""

    t_total: Count
    warmup_iterations: Index = 0
    use_warmup: bool = False
    min_lr: Finite = 1e-5

    def factor(self, t: int) -> float:
        """The triangle, before the floor."""
        return _triangle(t, self.warmup_iterations, self.t_total)

    def least(self) -> float:
        """The floor."""
        return self.min_lr


def _triangle(t: int, warmup: int, total: int) -> float:
    return _ramp(t, warmup) if t < warmup else max(0.0, (total - t) / max(1, total - warmup))


_BERT_METHODS: dict[str, Callable[[float, float], float]] = {
    "warmup_linear": lambda x, warmup: max((x - 1.0) / (warmup - 1.0), 0.0),
    "warmup_cosine": lambda x, warmup: 0.5 * (1.0 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: 1.0,
}


@dataclasses.dataclass(frozen=True)
class BertWarmupLinearRule(FactorRule):
    """BERT's schedule on the part of the run that is done; `warmup` is the part of the run that warms up.

    Without a warm-up (-1) the linear method starts at half the initial value, as in BERT's own code.
    """

    max_iters: CountOrNever
    warmup: Decay | Literal[-1] = -1
    warmup_method: str = "warmup_linear"

    def __post_init__(self) -> None:
        _check_method(self.warmup_method, tuple(_BERT_METHODS))

    def factor(self, t: int) -> float:
        """The factor at this part of the run; 1 where `max_iters` is -1."""
        if self.max_iters == -1:
            return 1.0
        done = t / self.max_iters
        return done / self.warmup if done < self.warmup else _BERT_METHODS[self.warmup_method](done, self.warmup)


@dataclasses.dataclass(frozen=True)
class UnchangedRule(FactorRule):
    """The initial value throughout."""

    def factor(self, t: int) -> float:
        """Always 1."""
        return 1.0


@dataclasses.dataclass(frozen=True)
class WarmupRule(FactorRule):
    """A linear warm-up from 0, then the initial value."""

    num_warmup_steps: Index

    def factor(self, t: int) -> float:
        """The ramp, up to 1."""
        return _ramp(t, self.num_warmup_steps) if t < self.num_warmup_steps else 1.0


@dataclasses.dataclass(frozen=True)
class _WarmupDecayRule(FactorRule):
    """A linear warm-up from 0, then `decay` of the part of the remaining run that is done."""

    num_warmup_steps: Index
    num_training_steps: Count

    def decay(self, part: float) -> float:
        raise NotImplementedError

    def factor(self, t: int) -> float:
        if t < self.num_warmup_steps:
            return _ramp(t, self.num_warmup_steps)
        return self.decay((t - self.num_warmup_steps) / max(1, self.num_training_steps - self.num_warmup_steps))


@dataclasses.dataclass(frozen=True)
class WarmupLinearRule(_WarmupDecayRule):
    """A linear warm-up from 0 and a linear fall to 0."""

    def decay(self, part: float) -> float:
        """The straight line to 0."""
        return max(0.0, 1.0 - part)


@dataclasses.dataclass(frozen=True)
class WarmupHalfCosineRule(_WarmupDecayRule):
    """A linear warm-up from 0, then `num_cycles` of a cosine."""

    num_cycles: Finite = 0.5

    def decay(self, part: float) -> float:
        """The cosine."""
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 2.0 * self.num_cycles * part)))


@dataclasses.dataclass(frozen=True)
class WarmupCosineRestartsRule(_WarmupDecayRule):
    """A linear warm-up from 0, then `num_cycles` half cosines, each starting anew."""

    num_cycles: Count = 1

    def decay(self, part: float) -> float:
        """The half cosine of the cycle; 0 when the run is over."""
        return 0.0 if part >= 1.0 else max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((self.num_cycles * part) % 1.0))))


@dataclasses.dataclass(frozen=True)
class WarmupPolynomialRule(_WarmupDecayRule):
    """A linear warm-up from 0, then a power of what is left, down to `lr_end` for the optimizer's own initial value."""

    lr_end: Finite = 1e-7
    power: Finite = 1.0

    def decay(self, part: float) -> float:
        """The power of what is left of the run."""
        return max(0.0, 1.0 - part) ** self.power

    def bind(self, span: int) -> StepFunction:
        """Towards `lr_end` once the warm-up is over."""

        def change(t: int) -> tuple[float, float, float]:
            factor = self.factor(t)
            return (0.0, 0.0 if t < self.num_warmup_steps else 1.0 - factor, factor)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """`lr_end`, scaled as the group's initial value is to the optimizer's own."""
        if self.lr_end >= reference:
            raise ConfigError(f"lr_end is smaller than the initial value {reference}, found {self.lr_end}")
        return [self.lr_end * base / reference for base in bases]


@dataclasses.dataclass(frozen=True)
class ImixPlateauSettings(PlateauSettings):
    """`PlateauSettings` with iMIX's name for the direction: `mode` is 'min' or 'max'."""

    rule: Literal["less", "greater"] = dataclasses.field(default="less", init=False)
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", "less" if self.mode == "min" else "greater")


def _make_imix(name: str, family: type[Any]) -> type[ParamScheduler]:
    return make_scheduler(name, family, "lr", by_epoch=False)


WarmupMultiStepLR = _make_imix("WarmupMultiStepLR", WarmupMultiStepRule)
WarmupCosineLR = _make_imix("WarmupCosineLR", WarmupCosineRule)
PythiaScheduler = _make_imix("PythiaScheduler", PythiaRule)
MultiStepScheduler = _make_imix("MultiStepScheduler", PythiaMultiStepRule)
WarmupLinearScheduleNonZero = _make_imix("WarmupLinearScheduleNonZero", WarmupLinearNonZeroRule)
BertWarmupLinearLR = _make_imix("BertWarmupLinearLR", BertWarmupLinearRule)
ConstantSchedule = _make_imix("ConstantSchedule", UnchangedRule)
WarmupConstantSchedule = _make_imix("WarmupConstantSchedule", WarmupRule)
WarmupLinearSchedule = _make_imix("WarmupLinearSchedule", WarmupLinearRule)
WarmupCosineSchedule = _make_imix("WarmupCosineSchedule", WarmupHalfCosineRule)
WarmupCosineWithHardRestartsSchedule = _make_imix("WarmupCosineWithHardRestartsSchedule", WarmupCosineRestartsRule)
WarmupPolynomialSchedule = _make_imix("WarmupPolynomialSchedule", WarmupPolynomialRule)
ReduceOnPlateauSchedule = make_scheduler("ReduceOnPlateauSchedule", ImixPlateauSettings, "lr", PlateauScheduler)
