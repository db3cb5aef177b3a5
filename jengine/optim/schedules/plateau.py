"""Reduce a value when a metric of the validation stops improving.

The one schedule that is not a function of the counter: what it has seen is its state, saved with every checkpoint.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

from jengine.annotations import Decay, Finite, Index, NonNegative
from jengine.errors import ConfigError, UnknownNameError, closest
from jengine.optim.schedules.rules import Settings
from jengine.optim.schedules.scheduler import ParamScheduler

_RULES = ("less", "greater")
_THRESHOLD_RULES = ("rel", "abs")


@dataclasses.dataclass(frozen=True)
class PlateauSettings(Settings):
    """Settings of the reduction on a plateau.

    `patience` and `cooldown` count validations. `min_value` is one floor or one per group, the last of which also
    holds for the optimizer's own settings.
    """

    epoch_units: ClassVar[tuple[str, ...] | None] = None
    monitor: str = "loss"
    rule: Literal["less", "greater"] = "less"
    factor: Decay = 0.1
    patience: Index = 10
    threshold: Finite = 1e-4
    threshold_rule: Literal["rel", "abs"] = "rel"
    cooldown: Index = 0
    min_value: Finite | Sequence[Finite] = 0.0
    eps: NonNegative = 1e-8

    def is_better(self, metric: float, best: float) -> bool:
        """Whether `metric` improves on `best` by more than the threshold."""
        margin = best * self.threshold if self.threshold_rule == "rel" else self.threshold
        return metric < best - margin if self.rule == "less" else metric > best + margin


class PlateauState(NamedTuple):
    """What the schedule has seen."""

    best: float  # the best metric so far
    bad: int = 0  # validations without improvement
    cooldown: int = 0  # validations that still do not count


def observe(settings: PlateauSettings, state: PlateauState, metric: float) -> tuple[PlateauState, bool]:
    """The state after one more validation, and whether the value is to be reduced."""
    best, bad, cooldown = state
    if settings.is_better(metric, best):
        best, bad = metric, 0
    else:
        bad += 1
    if cooldown > 0:
        cooldown, bad = cooldown - 1, 0
    if bad > settings.patience:
        return PlateauState(best, 0, settings.cooldown), True
    return PlateauState(best, bad, cooldown), False


class PlateauScheduler(ParamScheduler):
    """A parameter scheduler that multiplies by `factor` when the monitored metric stops improving."""

    need_val_args: ClassVar[bool] = True
    settings: PlateauSettings

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if not kwargs.get("by_epoch", True):
            raise AssertionError(f"{type(self).__name__} follows validations: it works with by_epoch=True only")
        self.reductions: list[int] = []  # the global step of each reduction, so that they can be replayed
        super().__init__(*args, **kwargs)
        self.state = PlateauState(best=1e9 if self.settings.rule == "less" else -1e9)

    def step(self, metrics: Mapping[str, float] | None = None) -> None:
        """Counts an epoch, or with the metrics of a validation looks at the monitored one.

        Raises:
          TypeError: `metrics` is no mapping. KeyError: the monitored metric is not in it.
        """
        if metrics is None:
            self.global_step += 1
            return
        if not isinstance(metrics, Mapping):
            raise TypeError(f"metrics are a dict by name, found {type(metrics).__name__}")
        if not self.begin <= self.global_step < self.end:
            return
        if self.settings.monitor not in metrics:
            raise UnknownNameError(
                f"the validation gave no metric {self.settings.monitor!r}{closest(self.settings.monitor, metrics)}"
            )
        self.last_step += 1
        self.state, reduce = observe(self.settings, self.state, float(metrics[self.settings.monitor]))
        if reduce:
            self.reductions.append(self.global_step)
            self.reduce()
        if self.verbose:
            self._log_values()

    def reduce(self) -> None:
        """Multiplies the value of every driven group by `factor`, down to its minimum."""
        groups = self._groups()
        for place, _, least in self._driven:
            value = float(groups[place][self.param_name])
            reduced = max(value * self.settings.factor, least)
            if value - reduced > self.settings.eps:
                self._write(groups[place], reduced)

    def state_dict(self) -> dict[str, Any]:
        """As for every scheduler, and what has been seen."""
        return {**super().state_dict(), "plateau": self.state._asdict(), "reductions": list(self.reductions)}

    def load_state_dict(self, state: dict[str, Any], settings: str = "checkpoint") -> None:
        """As for every scheduler; what has been seen comes from the state under either choice of settings."""
        super().load_state_dict(state, settings)
        if "plateau" in state:
            self.state = PlateauState(**state["plateau"])
            self.reductions = list(state["reductions"])

    def _bind(self) -> None:
        super()._bind()
        least = self.settings.min_value
        count = len(self.base_values)
        if isinstance(least, int | float):
            floors = [float(least)] * count
        else:
            floors = [float(value) for value in least]
            if len(floors) == count - 1 and getattr(self.optimizer, "base_param_settings", None) is not None:
                floors.append(floors[-1])
            if len(floors) != count:
                raise ConfigError(f"min_value has {len(least)} values for {count} parameter groups")
        self._driven = [driven._replace(anchor=floors[driven.place]) for driven in self._driven]
