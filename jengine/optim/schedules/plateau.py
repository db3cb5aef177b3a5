"""Schedules that reduce a value when a validation metric stops improving.

They alone are not functions of the counter: what they have seen is saved in every checkpoint.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from jengine.config.annotations import Decay, Index, NonNegative
from jengine.config.errors import ArgumentError, ConfigError, UnknownNameError, closest
from jengine.config.scores import is_better
from jengine.optim.schedules.chain import default_group
from jengine.optim.schedules.formulas import Changes, Formula, Steps, keep
from jengine.optim.schedules.scheduler import ParamScheduler


@dataclasses.dataclass(frozen=True)
class PlateauSettings(Formula):
    """Multiply the value by `factor` when a validation metric stops improving.

    `patience` and `cooldown` count validations. `min_value` is one number or one per group; the
    optimizer's own settings use the last one.

    Attributes:
      monitor: metric name.
      rule: whether a smaller or a larger metric is better.
      factor: multiplies the value.
      patience: number of validations in a row without an improvement that are tolerated.
      threshold: an improvement must be larger than this.
      threshold_rule: whether `threshold` is a share of the best metric's absolute value, or a
        difference.
      cooldown: number of validations after a reduction that are not counted.
      min_value: lower bound, one number or one for each parameter group.
      eps: smallest reduction; smaller ones are not applied.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = None
    monitor: str = "loss"
    rule: Literal["less", "greater"] = "less"
    factor: Decay = 0.1
    patience: Index = 10
    threshold: NonNegative = 1e-4
    threshold_rule: Literal["rel", "abs"] = "rel"
    cooldown: Index = 0
    min_value: NonNegative | Sequence[NonNegative] = 0.0
    eps: NonNegative = 1e-8

    def changes(self, steps: Steps, num_steps: int) -> Changes:
        """Return changes that keep the value: only validations change it."""
        return keep(steps)

    def is_better(self, metric: float, best: float | None) -> bool:
        """Return whether `metric` improves on `best` by more than the threshold.

        Any number improves on None.

        >>> PlateauSettings(threshold=0.1).is_better(metric=0.95, best=1.0)
        False
        """
        # Relative to the absolute value: a share of a negative best would count a worse metric as
        # an improvement.
        share = abs(best) if best is not None and math.isfinite(best) else 0.0
        threshold = share * self.threshold if self.threshold_rule == "rel" else self.threshold
        return is_better(self.rule, metric, best, threshold)


class PlateauState(NamedTuple):
    """What a plateau schedule remembers of the metric."""

    best: float | None = None  # the best metric so far
    bad: int = 0  # validations without improvement
    cooldown: int = 0  # remaining cooldown, in validations


def observe(
    settings: PlateauSettings, state: PlateauState, metric: float
) -> tuple[PlateauState, bool]:
    """Return the state after another validation, and whether to reduce the value."""
    best, bad, cooldown = state
    if settings.is_better(metric, best):
        best = metric
        bad = 0
    else:
        bad += 1
    # After the comparison, as in PyTorch: an improvement within the cooldown still becomes the best
    # metric.
    if cooldown > 0:
        cooldown = cooldown - 1
        bad = 0
    if bad > settings.patience:
        return PlateauState(best, 0, settings.cooldown), True
    return PlateauState(best, bad, cooldown), False


class PlateauScheduler(ParamScheduler):
    """Scheduler that multiplies a value by `factor` when the monitored metric stops improving."""

    need_val_args: ClassVar[bool] = True
    settings: PlateauSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("by_epoch", True):
            raise ArgumentError(
                f"`by_epoch` must be True for {type(self).__name__}, which counts validations, "
                "got False"
            )
        super().__init__(*args, **kwargs)
        self.state = PlateauState()

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Count an epoch; or, given validation metrics, check whether to reduce the value."""
        if metrics is None:
            self.global_step += 1
            self.chain.advance(self)
            return
        if not isinstance(metrics, Mapping):
            raise TypeError(f"`metrics` must be a dict by name, got {type(metrics).__name__}")
        # Outside the range the metric is not even remembered: what it was before `begin` must not
        # end the patience.
        if not self.begin <= self.global_step < self.end:
            return
        if self.settings.monitor not in metrics:
            raise UnknownNameError(
                f"`monitor` must be a metric of the validation, got {self.settings.monitor!r}"
                f"{closest(self.settings.monitor, metrics)}"
            )
        self.last_step += 1
        self.state, reduce = observe(
            self.settings, self.state, float(metrics[self.settings.monitor])
        )
        if reduce:
            self.chain.sync(self.param_name)
            self.reductions = [*self.reductions, self.chain.counts()]
            self.chain.reduce(self)
        if self.verbose:
            self._log_values()

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler state, the metric history, and the reductions."""
        return {
            **super().state_dict(),
            "last_step": self.last_step,
            "plateau": self.state._asdict(),
            "reductions": list(self.reductions),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set the counters and the metric history."""
        super().restore(state)
        if "plateau" in state:
            self.last_step = state["last_step"]
            self.state = PlateauState(**state["plateau"])
            self.reductions = [tuple(at) for at in state["reductions"]]

    def seek(self, count: int) -> None:
        """Set the number of completed epochs; what the schedule has seen of the metric stays."""
        self.global_step = count

    def find_targets(self, initials: Sequence[float], reference: float) -> list[float]:
        """Return the minimum of each group."""
        min_value = self.settings.min_value
        count = len(initials)
        if isinstance(min_value, int | float):
            return [float(min_value)] * count
        targets = [float(value) for value in min_value]
        if len(targets) == count - 1 and default_group(self.optimizer) is not None:
            # The optimizer's own settings are one more group, which the user's list does not know.
            targets.append(targets[-1])
        if len(targets) != count:
            raise ConfigError(
                f"`min_value` must have one value for each of the {count} parameter groups, got "
                f"{len(min_value)}"
            )
        return targets
