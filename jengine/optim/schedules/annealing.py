"""Cosine annealing."""

import dataclasses
import math
from typing import ClassVar

import numpy as np

from jengine.config.annotations import NonNegative, Positive
from jengine.config.errors import ArgumentError
from jengine.optim.schedules.formulas import (
    Changes,
    MinimumFormula,
    Steps,
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
