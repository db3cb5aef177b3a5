"""Learning rates that follow a batch size that changes."""

import dataclasses
import functools
from collections.abc import Sequence

from jengine.annotations import Count, Positive
from jengine.optim.schedules.chain import Event, Groups, Value
from jengine.optim.schedules.rules import Changes, Rule, Steps, keep
from jengine.optim.schedules.scheduler import ParamScheduler


@dataclasses.dataclass(frozen=True)
class BatchScaleRule(Rule):
    """Multiply the value by a factor at some iterations, whatever other schedules do.

    Attributes:
      milestones: the iterations.
      factors: the factor at each of them.
    """

    milestones: Sequence[Count]
    factors: Sequence[Positive]

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return no changes: the factors are events, which schedules that set the value respect."""
        return keep(steps)


class BatchScaleLR(ParamScheduler):
    """Scheduler that multiplies the learning rate where the batch size changes; see `auto_scale_lr`.

    Args:
      optimizer: the optimizer wrapper.
      milestones: the iterations at which the batch size changes.
      factors: what multiplies the rate from each of them on.
    """

    def __init__(self, optimizer: Groups, milestones: Sequence[int], factors: Sequence[float]) -> None:
        super().__init__(optimizer, "lr", BatchScaleRule(tuple(milestones), tuple(factors)), by_epoch=False)

    def step(self) -> None:
        """Count an iteration; at a milestone, multiply the rate."""
        super().step()
        if self.global_step in self.settings.milestones:
            self.chain.apply_event(self)

    def events(self, index: int, iters: int | None = None) -> Sequence[tuple[int, int, Event]]:
        """Return the factors up to an iteration."""
        last = self.global_step if iters is None else iters
        pairs = zip(self.settings.milestones, self.settings.factors, strict=True)
        return [(at, 0, functools.partial(_multiply, factor)) for at, factor in pairs if at <= last]


def _multiply(factor: float, value: Value) -> None:
    value.current *= factor
    value.scale *= factor
