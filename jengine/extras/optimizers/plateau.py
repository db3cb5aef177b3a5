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
from jengine.optim.schedules.formulas import Changes, Formula, Steps, keep
from jengine.optim.schedules.scheduler import ParamScheduler
from jengine.optim.schedules.variants import make_variants


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

    def targets(self, initial_values: Sequence[float], reference: float) -> list[float]:
        """Return the minimum of each group."""
        count = len(initial_values)
        if isinstance(self.min_value, int | float):
            return [float(self.min_value)] * count
        if len(self.min_value) not in (count, count - 1):
            raise ConfigError(
                f"`min_value` must have one value for each of the {count} parameter groups, got "
                f"{len(self.min_value)}"
            )
        # The optimizer's own settings are one more group, which the user's list does not know.
        return [float(value) for value in (*self.min_value, self.min_value[-1])][:count]

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
        # Outside the range the metric is not even remembered: what it was before `begin` must not
        # end the patience.
        if not self.begin <= self.global_step < self.end:
            return
        settings = self.settings
        if settings.monitor not in metrics:
            raise UnknownNameError(
                f"`monitor` must be a metric of the validation, got {settings.monitor!r}"
                f"{closest(settings.monitor, metrics)}"
            )
        self.last_step += 1
        metric = float(metrics[settings.monitor])
        best, bad, cooldown = self.state
        # As in PyTorch: an improvement within the cooldown still becomes the best metric
        improves = settings.is_better(metric, best)
        bad = 0 if improves or cooldown > 0 else bad + 1
        reduces = bad > settings.patience
        self.state = PlateauState(
            metric if improves else best,
            0 if reduces else bad,
            settings.cooldown if reduces else max(cooldown - 1, 0),
        )
        if reduces:
            self._reduce()
        if self.verbose:
            self._log_values()

    def _reduce(self) -> None:
        """Multiply the values in the groups, as if by hand, so that other schedules go on from
        them.
        """
        name = self.param_name
        for index, group in enumerate(self.chain.groups):
            if self.scheduled[index]:
                reduced = max(group[name] * self.settings.factor, self.targets[index])
                # As in PyTorch: a reduction too small to matter is not applied
                if group[name] - reduced > self.settings.eps:
                    group[name] = reduced
        self.chain.sync(name)

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler state and the metric history."""
        return {
            **super().state_dict(),
            "last_step": self.last_step,
            "plateau": self.state._asdict(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Set the counters and the metric history."""
        super().restore(state)
        if "plateau" in state:
            self.last_step = state["last_step"]
            self.state = PlateauState(**state["plateau"])

    def seek(self, count: int) -> None:
        """Set the number of completed epochs; what the schedule has seen of the metric stays."""
        self.global_step = count


ReduceOnPlateauLR, ReduceOnPlateauMomentum, ReduceOnPlateauParamScheduler = make_variants(
    "ReduceOnPlateau", PlateauSettings, PlateauScheduler
)
