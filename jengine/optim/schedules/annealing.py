"""The rules that follow cosines: annealing, annealing with restarts, and the one-cycle policy."""

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar, Literal

from jengine.annotations import Finite, Fraction, Positive
from jengine.errors import ConfigError
from jengine.optim.schedules.rules import Affine, ConflictError, Rule, StepFunction


def _floors(bases: Sequence[float], eta_min: Finite | None, ratio: float | None) -> list[float]:
    return [base * ratio if ratio is not None else eta_min or 0.0 for base in bases]


@dataclasses.dataclass(frozen=True)
class CosineAnnealingRule(Rule):
    """Half a cosine from the value at `begin` down to a floor in `T_max` steps, and up again after that.

    Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with Warm Restarts", 2017, without the restarts.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("T_max",)
    T_max: Positive | None = None
    eta_min: Finite | None = None
    eta_min_ratio: Finite | None = dataclasses.field(default=None, kw_only=True)

    def __post_init__(self) -> None:
        if self.eta_min is not None and self.eta_min_ratio is not None:
            raise ConflictError("give eta_min or eta_min_ratio, not both")

    def bind(self, span: int) -> StepFunction:
        """The ratio form, but for the step after a trough, where there is nothing left to multiply."""
        length = span if self.T_max is None else self.T_max
        cos, step, period = math.cos, math.pi / length, 2 * length
        rebound = (1.0 - cos(step)) / 2.0

        def change(t: int) -> Affine | None:
            """How the value of step t follows from the one before; None: it stays."""
            if t == 0:
                return None
            if (t - 1 - length) % period == 0:
                return (1.0, -rebound, rebound)
            ratio = (1.0 + cos(step * t)) / (1.0 + cos(step * (t - 1)))
            return (ratio, 1.0 - ratio, 0.0)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """The floor of each group."""
        return _floors(bases, self.eta_min, self.eta_min_ratio)


@dataclasses.dataclass(frozen=True)
class CosineRestartRule(Rule):
    """One half cosine per period, each starting at its weight times the initial value (SGDR, as above)."""

    epoch_units: ClassVar[tuple[str, ...] | None] = ("periods",)
    periods: Sequence[Positive]
    restart_weights: Sequence[Finite] = (1,)
    eta_min: Finite | None = None
    eta_min_ratio: Finite | None = None

    def __post_init__(self) -> None:
        if (self.eta_min is None) == (self.eta_min_ratio is None):
            raise ConflictError("give one of eta_min and eta_min_ratio")
        if len(self.periods) != len(self.restart_weights):
            raise ConflictError(
                f"periods and restart_weights are of equal length, found {len(self.periods)} and "
                f"{len(self.restart_weights)}"
            )
        object.__setattr__(self, "periods", tuple(self.periods))
        object.__setattr__(self, "restart_weights", tuple(self.restart_weights))

    def bind(self, span: int) -> StepFunction:
        """Sets the value at the start of a period, follows the ratio form inside, rests after the last."""
        ends = list(itertools.accumulate(self.periods))
        starts = [0, *ends[:-1]]

        def change(t: int) -> Affine | None:
            """How the value of step t follows from the one before; None: it stays."""
            period = bisect.bisect_right(ends, t)
            if period == len(ends):
                return None
            if t == starts[period]:
                return (0.0, 0.0, float(self.restart_weights[period]))
            step, since = math.pi / self.periods[period], t - starts[period]
            ratio = (1.0 + math.cos(step * since)) / (1.0 + math.cos(step * (since - 1)))
            return (ratio, 1.0 - ratio, 0.0)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """The floor of each group."""
        return _floors(bases, self.eta_min, self.eta_min_ratio)


@dataclasses.dataclass(frozen=True)
class OneCycleRule(Rule):
    """From `eta_max / div_factor` up to `eta_max`, then down to a `final_div_factor`-th of where it began.

    It sets values outright, the initial ones too, and so chains with nothing that runs at the same time.
    Smith and Topin, "Super-Convergence: Very Fast Training of Neural Networks Using Large Learning Rates", 2018.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = ("total_steps",)
    eta_max: Finite | Sequence[Finite]
    total_steps: Positive | None = None
    pct_start: Fraction = 0.3
    anneal_strategy: Literal["cos", "linear"] = "cos"
    div_factor: Positive = 25.0
    final_div_factor: Positive = 1e4
    three_phase: bool = False

    def bind(self, span: int) -> StepFunction:
        """The value as a part of `eta_max`, phase by phase."""
        total = span if self.total_steps is None else self.total_steps
        anneal = _ANNEAL[self.anneal_strategy]
        start = 1.0 / self.div_factor
        finish = start / self.final_div_factor
        up = self.pct_start * total - 1.0
        phases = [(0.0, up, start, 1.0), (up, total - 1.0, 1.0, finish)]
        if self.three_phase:
            phases[1:] = [(up, 2.0 * up, 1.0, start), (2.0 * up, total - 1.0, start, finish)]

        def change(t: int) -> Affine:
            """How the value of step t follows from the one before; None: it stays."""
            if t > total:
                raise ConfigError(f"the one-cycle schedule has total_steps={total} and was stepped past it")
            for begin, end, low, high in phases:
                if t <= end:
                    part = (t - begin) / (end - begin) if end > begin else 1.0
                    return (0.0, anneal(low, high, part), 0.0)
            return (0.0, finish, 0.0)

        return change

    def anchors(self, bases: Sequence[float], reference: float) -> list[float]:
        """`eta_max` of each group; raises ValueError when it is a list of another length."""
        if isinstance(self.eta_max, int | float):
            return [float(self.eta_max)] * len(bases)
        if len(self.eta_max) != len(bases):
            raise ConfigError(
                f"eta_max has {len(self.eta_max)} values for {len(bases)} parameter groups; the optimizer's own "
                "settings count as the last group where there are several"
            )
        return [float(value) for value in self.eta_max]

    def initials(self, bases: Sequence[float]) -> list[float]:
        """Where the cycle starts, which becomes the initial value."""
        return [eta / self.div_factor for eta in self.anchors(bases, 0.0)]


_ANNEAL = {
    "cos": lambda low, high, part: high + (low - high) / 2.0 * (1.0 + math.cos(math.pi * part)),
    "linear": lambda low, high, part: low + (high - low) * part,
}
