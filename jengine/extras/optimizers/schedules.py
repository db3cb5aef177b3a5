"""More schedules: restarts, the one-cycle policy, and those of MMDetection and MMSegmentation."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from jengine.config.annotations import Fraction, NonNegative, Positive
from jengine.config.errors import ArgumentError, ConfigError
from jengine.optim.schedules.formulas import (
    INF,
    Changes,
    Formula,
    MinimumFormula,
    PolyFormula,
    Steps,
    cosine_ratios,
    keep,
    map_floats,
    towards_target,
)
from jengine.optim.schedules.variants import make_scheduler, make_variants


@dataclasses.dataclass(frozen=True)
class CosineRestartFormula(MinimumFormula):
    """Anneal along half a cosine in each period, from the period's weight times the initial value.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017.

    Attributes:
      periods: period lengths, in steps.
      restart_weights: for each period, what multiplies the initial value at the start.
      eta_min: value at the end of a period.
      eta_min_ratio: this value as a fraction of the initial one, instead of `eta_min`.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("periods",)
    periods: Sequence[Positive]
    restart_weights: Sequence[NonNegative] = (1,)
    eta_min: NonNegative | None = None
    eta_min_ratio: NonNegative | None = None

    def __post_init__(self) -> None:
        if (self.eta_min is None) == (self.eta_min_ratio is None):
            raise ArgumentError(
                "exactly one of `eta_min` and `eta_min_ratio` must be given, got "
                f"eta_min={self.eta_min} and eta_min_ratio={self.eta_min_ratio}"
            )
        if len(self.periods) != len(self.restart_weights):
            raise ArgumentError(
                "`periods` and `restart_weights` must have the same length, got "
                f"{len(self.periods)} and {len(self.restart_weights)}"
            )
        # Tuples, as the dataclass is frozen and compared with the settings in a checkpoint.
        object.__setattr__(self, "periods", tuple(self.periods))
        object.__setattr__(self, "restart_weights", tuple(self.restart_weights))

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return a new value at the start of each period and ratios within it.

        Nothing after the last one.
        """
        ends = np.cumsum(self.periods)
        index = np.searchsorted(ends, steps, "right")
        # After the last period the value stays what it is, and other schedulers may change it.
        a, b, c = keep(steps)
        for period, (end, length) in enumerate(zip(ends, self.periods, strict=True)):
            inside = np.flatnonzero(index == period)
            offset = steps[inside] - (end - length)
            a[inside], b[inside], _ = towards_target(cosine_ratios(math.pi / length, offset))
            # A new value rather than a ratio: at the end of a period the distance to the minimum is
            # 0.
            first = inside[offset == 0]
            a[first] = 0.0
            b[first] = 0.0
            c[first] = self.restart_weights[period]
        return a, b, c


@dataclasses.dataclass(frozen=True)
class OneCycleFormula(Formula):
    """Increase the value from `eta_max / div_factor` to `eta_max`, then decay to the start over
    `final_div_factor`.

    The formula sets the values, the initial ones too, so it does not chain with schedulers that run
    at the same time. Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks
    Using Large Learning Rates", 2018.

    Attributes:
      eta_max: the largest value, one number or one for each parameter group.
      total_steps: cycle length in steps; the whole schedule by default.
      pct_start: fraction of the cycle in which the value increases.
      anneal_strategy: shape of increase and decay.
      div_factor: `eta_max` divided by the start value.
      final_div_factor: start value divided by the last one.
      three_phase: decay to the start value first, as fast as the increase, and then to the last
        one.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("total_steps",)
    eta_max: NonNegative | Sequence[NonNegative]
    total_steps: Positive | None = None
    pct_start: Fraction = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: Positive = 25.0
    final_div_factor: Positive = 1e4
    three_phase: bool = False

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the value as a fraction of `eta_max`, phase by phase."""
        total = num_steps if self.total_steps is None else self.total_steps
        start = 1.0 / self.div_factor
        finish = start / self.final_div_factor
        # PyTorch's phases: the last step of the increase has the index pct_start * total - 1.
        peak = self.pct_start * total - 1.0
        phases = [(0.0, peak, start, 1.0), (peak, total - 1.0, 1.0, finish)]
        if self.three_phase:
            phases[1:] = [(peak, 2.0 * peak, 1.0, start), (2.0 * peak, total - 1.0, start, finish)]
        fractions = np.full(len(steps), finish)
        # the earliest phase that a step is in holds
        for begin, end, first, last in reversed(phases):
            inside = steps <= end
            progress = (
                (steps[inside] - begin) / (end - begin)
                if end > begin
                else np.ones(int(inside.sum()))
            )
            fractions[inside] = _ANNEAL[self.anneal_strategy](first, last, progress)
        fractions[steps > total] = math.nan  # no legal value
        return np.zeros(len(steps)), fractions, np.zeros(len(steps))

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return `eta_max` of each group; raise ConfigError if the list has another length."""
        if isinstance(self.eta_max, int | float):
            return [float(self.eta_max)] * len(initial_values)
        if len(self.eta_max) != len(initial_values):
            raise ConfigError(
                f"`eta_max` must have one value for each of the {len(initial_values)} parameter "
                f"groups, got {len(self.eta_max)}; with several groups, the optimizer's own "
                "settings count as the last one"
            )
        return [float(value) for value in self.eta_max]

    def initial_values(self, values: Sequence[float]) -> list[float]:
        """Return the start of the cycle, which becomes the initial value."""
        return [eta / self.div_factor for eta in self.targets(values, 0.0)]


def _anneal_cosine(first: float, last: float, fraction: np.ndarray) -> np.ndarray:
    return last + (first - last) / 2.0 * (1.0 + map_floats(math.cos, (math.pi * fraction).tolist()))


_ANNEAL = {
    "cos": _anneal_cosine,
    "linear": lambda first, last, fraction: first + (last - first) * fraction,
}


@dataclasses.dataclass(frozen=True)
class PolyRatioFormula(PolyFormula):
    """Decay like `PolyFormula`, to a minimum that may be a fraction of each initial value
    (MMSegmentation).

    Attributes:
      eta_min_ratio: value at the last step as a fraction of the initial one; replaces `eta_min`.
    """

    eta_min_ratio: NonNegative | None = None


@dataclasses.dataclass(frozen=True)
class QuadraticWarmupFormula(Formula):
    """Increase the value as the square of the step, to the initial value at the last step
    (MMDetection).
    """

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return increments `(2t + 1) / num_steps**2`, as a fraction.

        Raise ConfigError without an end.
        """
        if num_steps >= INF:
            raise ConfigError("`end` must be given for a quadratic warm-up, got no end")
        # (t + 1)**2 - t**2 = 2t + 1; the first step sets the value, later ones add to it.
        return (
            (steps > 0).astype(np.float64),
            np.zeros(len(steps)),
            (2 * steps + 1) / float(num_steps**2),
        )


CosineRestartLR, CosineRestartMomentum, CosineRestartParamScheduler = make_variants(
    "CosineRestart", CosineRestartFormula
)
OneCycleLR = make_scheduler("OneCycleLR", OneCycleFormula, "lr")
OneCycleParamScheduler = make_scheduler("OneCycleParamScheduler", OneCycleFormula)
PolyLRRatio = make_scheduler("PolyLRRatio", PolyRatioFormula, "lr")
QuadraticWarmupLR, QuadraticWarmupMomentum, QuadraticWarmupParamScheduler = make_variants(
    "QuadraticWarmup", QuadraticWarmupFormula
)
