"""Learning rates that follow a batch size that changes."""

import dataclasses
from collections.abc import Sequence
from typing import ClassVar

from jengine.config.annotations import Count, Positive
from jengine.optim.schedules.chain import Groups
from jengine.optim.schedules.formulas import Changes, Formula, Steps, keep
from jengine.optim.schedules.scheduler import ParamScheduler


@dataclasses.dataclass(frozen=True)
class BatchScaleFormula(Formula):
    """Multiply the value by a factor at some iterations.

    Attributes:
      milestones: the iterations.
      factors: the factor at each of them.
    """

    is_scale: ClassVar[bool] = True
    milestones: Sequence[Count]
    factors: Sequence[Positive]

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return the factors at the milestones."""
        a, b, c = keep(steps)
        for milestone, factor in zip(self.milestones, self.factors, strict=True):
            a[steps == milestone] = factor
        return a, b, c


class BatchScaleLR(ParamScheduler):
    """Scheduler that multiplies the learning rate where the batch size changes.

    See `auto_scale_lr`.

    Args:
      optimizer: the optimizer wrapper.
      milestones: the iterations at which the batch size changes.
      factors: what multiplies the rate from each of them on.
    """

    def __init__(
        self, optimizer: Groups, milestones: Sequence[int], factors: Sequence[float]
    ) -> None:
        super().__init__(
            optimizer, "lr", BatchScaleFormula(tuple(milestones), tuple(factors)), by_epoch=False
        )
