"""Cosine formulas: annealing, annealing with restarts, and the one-cycle policy."""

import dataclasses
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np

from jengine.config.annotations import Fraction, NonNegative, Positive
from jengine.config.errors import ArgumentError, ConfigError
from jengine.optim.schedules.formulas import (
    Changes,
    Formula,
    MinimumFormula,
    Steps,
    keep,
    map_floats,
    towards_target,
)


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
        a, b, c = towards_target(_cosine_ratios(step, steps))
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
            a[inside], b[inside], _ = towards_target(_cosine_ratios(math.pi / length, offset))
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
    sets_value: ClassVar[bool] = True
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


def _cosine_ratios(step: float, steps: np.ndarray) -> np.ndarray:
    """Return `(1 + cos(step * t)) / (1 + cos(step * (t - 1)))` at consecutive steps.

    Infinite by a 0.
    """
    heights = 1.0 + map_floats(math.cos, (step * np.append(steps[:1] - 1, steps)).tolist())
    with np.errstate(divide="ignore", invalid="ignore"):
        return heights[1:] / heights[:-1]


def _anneal_cosine(first: float, last: float, fraction: np.ndarray) -> np.ndarray:
    return last + (first - last) / 2.0 * (1.0 + map_floats(math.cos, (math.pi * fraction).tolist()))


_ANNEAL = {
    "cos": _anneal_cosine,
    "linear": lambda first, last, fraction: first + (last - first) * fraction,
}
