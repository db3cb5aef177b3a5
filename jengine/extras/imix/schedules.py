"""iMIX's learning rate schedules, whose steps are iterations.

Each formula computes a factor of the initial value: first iMIX's own formulas and BERT's, then the
  formulas
of Hugging Face Transformers that iMIX wraps, then the plateau settings. The module ends with the
registration.
"""

import bisect
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from jengine.config.annotations import Count, CountOrNever, Decay, Finite, Index, NonNegative
from jengine.config.errors import ArgumentError, ConfigError
from jengine.extras.optimizers.plateau import PlateauScheduler, PlateauSettings
from jengine.optim.schedules.formulas import Changes, Formula, Steps, map_floats, sorted_milestones
from jengine.optim.schedules.scheduler import ParamScheduler
from jengine.optim.schedules.variants import make_scheduler


@dataclasses.dataclass(frozen=True)
class _FactorFormula(Formula):
    """Formula that sets the value to `factor(t)` times the initial value at step `t`, counted from
    `begin`.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = None

    def factor(self, t: int) -> float:
        return 1.0

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        zeros = np.zeros(len(steps))
        return zeros, zeros, map_floats(self.factor, steps.tolist())


def _ramp(t: int, length: int, start: float = 0.0) -> float:
    """Interpolate linearly from `start` at 0 to 1 at `length`."""
    fraction = t / max(1, length)
    return start * (1.0 - fraction) + fraction


def _warmup(method: str, t: int, length: int, start: float) -> float:
    if t >= length:
        return 1.0
    return start if method == "constant" else _ramp(t, length, start)


@dataclasses.dataclass(frozen=True)
class _WarmupMultiStepFormula(_FactorFormula):
    """Warm-up, and a multiplication by `gamma` at each milestone.

    Attributes:
      milestones: steps at which the value changes.
      gamma: factor applied at each milestone.
      warmup_factor: factor of the initial value at the start.
      warmup_iters: number of warm-up steps.
      warmup_method: whether the warm-up keeps `warmup_factor` or increases it to 1.
    """

    milestones: Sequence[NonNegative]
    gamma: NonNegative = 0.1
    warmup_factor: NonNegative = 0.001
    warmup_iters: Index = 1000
    warmup_method: Literal["constant", "linear"] = "linear"

    def __post_init__(self) -> None:
        object.__setattr__(self, "milestones", sorted_milestones("milestones", self.milestones))

    def factor(self, t: int) -> float:
        warmup = _warmup(self.warmup_method, t, self.warmup_iters, self.warmup_factor)
        return warmup * self.gamma ** bisect.bisect_right(self.milestones, t)


@dataclasses.dataclass(frozen=True)
class _WarmupCosineFormula(_FactorFormula):
    """Warm-up, and annealing along half a cosine over `max_iters`.

    Attributes:
      max_iters: step at which the half cosine ends.
      warmup_factor: factor of the initial value at the start.
      warmup_iters: number of warm-up steps.
      warmup_method: whether the warm-up keeps `warmup_factor` or increases it to 1.
    """

    max_iters: Count
    warmup_factor: NonNegative = 0.001
    warmup_iters: Index = 1000
    warmup_method: Literal["constant", "linear"] = "linear"

    def factor(self, t: int) -> float:
        warmup = _warmup(self.warmup_method, t, self.warmup_iters, self.warmup_factor)
        return warmup * 0.5 * (1.0 + math.cos(math.pi * t / self.max_iters))


@dataclasses.dataclass(frozen=True)
class _PythiaFormula(_FactorFormula):
    """Linear warm-up until step `warmup_iterations` inclusive, then a multiplication by `lr_ratio`
    at each `lr_steps`.

    Attributes:
      lr_steps: steps at which the value changes.
      lr_ratio: factor applied at each of them.
      warmup_iterations: last warm-up step.
      warmup_factor: factor of the initial value at the start.
      use_warmup: whether there is a warm-up.
    """

    lr_steps: Sequence[NonNegative]
    lr_ratio: NonNegative
    warmup_iterations: Index = 0
    warmup_factor: NonNegative = 0.0
    use_warmup: bool = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "lr_steps", sorted_milestones("lr_steps", self.lr_steps))

    def factor(self, t: int) -> float:
        if self.use_warmup and self.warmup_iterations > 0 and t <= self.warmup_iterations:
            return _ramp(t, self.warmup_iterations, self.warmup_factor)
        return self.lr_ratio ** bisect.bisect_right(self.lr_steps, t)


@dataclasses.dataclass(frozen=True)
class _PythiaMultiStepFormula(_PythiaFormula):
    """Schedule of `PythiaScheduler` whose warm-up must end before the first of `lr_steps`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.use_warmup and self.warmup_iterations >= self.lr_steps[0]:
            raise ArgumentError(
                "`warmup_iterations` must be smaller than the first of `lr_steps`, "
                f"{self.lr_steps[0]}, got {self.warmup_iterations}"
            )


@dataclasses.dataclass(frozen=True)
class _WarmupLinearNonZeroFormula(_FactorFormula):
    """Linear warm-up and decay, never below `min_lr`, including step 0.

    Attributes:
      t_total: step at which the value would be 0.
      warmup_iterations: number of warm-up steps.
      use_warmup: has no effect, as in iMIX.
      min_lr: lower bound.
    """

    t_total: Count
    warmup_iterations: Index = 0
    use_warmup: bool = False
    min_lr: NonNegative = 1e-5

    def factor(self, t: int) -> float:
        if t < self.warmup_iterations:
            return _ramp(t, self.warmup_iterations)
        return max(0.0, (self.t_total - t) / max(1, self.t_total - self.warmup_iterations))

    def floor(self) -> float:
        return self.min_lr


_BERT_METHODS: dict[str, Callable[[float, float], float]] = {
    "warmup_linear": lambda x, warmup: max((x - 1.0) / (warmup - 1.0), 0.0),
    "warmup_cosine": lambda x, warmup: 0.5 * (1.0 + math.cos(math.pi * x)),
    "warmup_constant": lambda x, warmup: 1.0,
}


@dataclasses.dataclass(frozen=True)
class _BertWarmupLinearFormula(_FactorFormula):
    """BERT's schedule over the completed fraction of the run.

    Without a warm-up (-1) the linear method starts at half the initial value, as in BERT's code.

    Attributes:
      max_iters: number of steps in the run; -1 keeps the initial value.
      warmup: fraction of the run that warms up; -1 for none.
      warmup_method: decay after the warm-up: 'warmup_linear', 'warmup_cosine' or 'warmup_constant'.
    """

    max_iters: CountOrNever
    warmup: Decay | Literal[-1] = -1
    warmup_method: Literal["warmup_linear", "warmup_cosine", "warmup_constant"] = "warmup_linear"

    def factor(self, t: int) -> float:
        if self.max_iters == -1:
            return 1.0
        x = t / self.max_iters
        return (
            x / self.warmup
            if x < self.warmup
            else _BERT_METHODS[self.warmup_method](x, self.warmup)
        )


@dataclasses.dataclass(frozen=True)
class _UnchangedFormula(_FactorFormula):
    """Constant initial value."""


@dataclasses.dataclass(frozen=True)
class _WarmupFormula(_FactorFormula):
    """Linear warm-up from 0, then the initial value.

    Attributes:
      num_warmup_steps: number of warm-up steps.
    """

    num_warmup_steps: Index

    def factor(self, t: int) -> float:
        return _ramp(t, self.num_warmup_steps) if t < self.num_warmup_steps else 1.0


@dataclasses.dataclass(frozen=True)
class _WarmupLinearFormula(_WarmupFormula):
    """Linear warm-up from 0, then a linear decay to 0.

    Attributes:
      num_training_steps: number of steps in the run.
    """

    num_training_steps: Count

    def decay(self, fraction: float) -> float:
        """Return the factor at a fraction of the steps after the warm-up."""
        return max(0.0, 1.0 - fraction)

    def factor(self, t: int) -> float:
        if t < self.num_warmup_steps:
            return super().factor(t)
        return self.decay(
            (t - self.num_warmup_steps) / max(1, self.num_training_steps - self.num_warmup_steps)
        )


@dataclasses.dataclass(frozen=True)
class _WarmupHalfCosineFormula(_WarmupLinearFormula):
    """Linear warm-up from 0, then `num_cycles` cycles of a cosine.

    Attributes:
      num_cycles: number of cycles; 0.5 decays to 0 once.
    """

    num_cycles: Finite = 0.5

    def decay(self, fraction: float) -> float:
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * 2.0 * self.num_cycles * fraction)))


@dataclasses.dataclass(frozen=True)
class _WarmupCosineRestartsFormula(_WarmupLinearFormula):
    """Linear warm-up from 0, then `num_cycles` half cosines, each starting at the initial value.

    Attributes:
      num_cycles: number of half cosines.
    """

    num_cycles: Count = 1

    def decay(self, fraction: float) -> float:
        if fraction >= 1.0:
            return 0.0
        return max(0.0, 0.5 * (1.0 + math.cos(math.pi * ((self.num_cycles * fraction) % 1.0))))


@dataclasses.dataclass(frozen=True)
class _WarmupPolynomialFormula(_WarmupLinearFormula):
    """Linear warm-up from 0, then a decay as a power of the remaining steps to `lr_end`, scaled for
    each group.

    Attributes:
      lr_end: value at the end of the run, for the optimizer's own learning rate.
      power: exponent of the remaining fraction.
    """

    lr_end: NonNegative = 1e-7
    power: NonNegative = 1.0

    def decay(self, fraction: float) -> float:
        return max(0.0, 1.0 - fraction) ** self.power

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        a, _, factors = super().changes(steps, num_steps)
        return a, np.where(steps < self.num_warmup_steps, 0.0, 1.0 - factors), factors

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        if self.lr_end >= reference:
            raise ConfigError(
                f"`lr_end` must be smaller than the initial value {reference}, got {self.lr_end}"
            )
        return [self.lr_end * initial / reference for initial in initial_values]


@dataclasses.dataclass(frozen=True)
class _PlateauSettings(PlateauSettings):
    """Multiply the value by `factor` when a validation metric stops improving.

    Attributes:
      mode: 'min' if a smaller metric is better, 'max' if a larger one.
    """

    # set from iMIX's `mode`
    rule: Literal["less", "greater"] = dataclasses.field(default="less", init=False)
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        object.__setattr__(self, "rule", "less" if self.mode == "min" else "greater")


def _make_scheduler(name: str, family: type[Any]) -> type[ParamScheduler]:
    return make_scheduler(name, family, "lr", by_epoch=False)


WarmupMultiStepLR = _make_scheduler("WarmupMultiStepLR", _WarmupMultiStepFormula)
WarmupCosineLR = _make_scheduler("WarmupCosineLR", _WarmupCosineFormula)
PythiaScheduler = _make_scheduler("PythiaScheduler", _PythiaFormula)
MultiStepScheduler = _make_scheduler("MultiStepScheduler", _PythiaMultiStepFormula)
WarmupLinearScheduleNonZero = _make_scheduler(
    "WarmupLinearScheduleNonZero", _WarmupLinearNonZeroFormula
)
BertWarmupLinearLR = _make_scheduler("BertWarmupLinearLR", _BertWarmupLinearFormula)
ConstantSchedule = _make_scheduler("ConstantSchedule", _UnchangedFormula)
WarmupConstantSchedule = _make_scheduler("WarmupConstantSchedule", _WarmupFormula)
WarmupLinearSchedule = _make_scheduler("WarmupLinearSchedule", _WarmupLinearFormula)
WarmupCosineSchedule = _make_scheduler("WarmupCosineSchedule", _WarmupHalfCosineFormula)
WarmupCosineWithHardRestartsSchedule = _make_scheduler(
    "WarmupCosineWithHardRestartsSchedule", _WarmupCosineRestartsFormula
)
WarmupPolynomialSchedule = _make_scheduler("WarmupPolynomialSchedule", _WarmupPolynomialFormula)
ReduceOnPlateauSchedule = make_scheduler(
    "ReduceOnPlateauSchedule", _PlateauSettings, "lr", PlateauScheduler
)
