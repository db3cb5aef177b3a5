"""Parameter schedulers: host objects that move one value of the parameter groups along a rule.

They write Python floats into the groups. The compiled step receives these as inputs, so that a schedule costs no device
work and no recompilation.
"""

import logging
import math
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jengine.annotations import is_host_number
from jengine.errors import ArgumentError, ConfigError, UnknownNameError, closest
from jengine.optim.schedules.rules import INF, Affine, ScheduleSettings

Group = MutableMapping[str, Any]  # a parameter group: host numbers by name
_LOGGER = logging.getLogger("jengine")
_MAX = 3.4028235e38  # of float32, the dtype of hyperparameters on the device
_ROUNDING = 1e-12  # a product of ratios may end just below 0
_RANGES = {"lr": (-_ROUNDING, _MAX), "weight_decay": (-_ROUNDING, _MAX), "momentum": (-_ROUNDING, 1 + _ROUNDING)}


class Groups(Protocol):
    """The part of an optimizer wrapper that a scheduler uses; it may also have `base_param_settings`."""

    @property
    def param_groups(self) -> Sequence[Group]:
        """Mappings of host numbers by name (`lr`, `momentum`, ...)."""


class ScheduledGroup(NamedTuple):
    """A parameter group that a scheduler changes."""

    group_index: int  # position in the list of groups
    initial: float  # initial value
    target: float  # constant towards which the rule moves the value


class Frozen(float):
    """The value 0 during a warm-up from 0, with the hidden value that the warm-up restores.

    Other schedules in the chain change the hidden value, so that the product is exact in any order.
    """

    hidden: float

    def __new__(cls, hidden: float) -> "Frozen":
        """Return a 0 that hides `hidden`."""
        value = super().__new__(cls, 0.0)
        value.hidden = hidden
        return value


class ParamScheduler:
    """Scheduler for one named value in the parameter groups.

    The constructor records the initial value of each group as `initial_<param_name>` and sets the value for the first
    iteration. Each `step` counts and, from `begin` to `end`, computes the next value from the current one, so that
    several schedulers chain in list order. After `end` the last value stays. Learning rate schedules skip groups whose
    `fix_lr` is true.

    >>> from jengine.optim import SGD, OptimWrapper
    >>> from jengine.optim.schedules import StepLR
    >>> wrapper = OptimWrapper(SGD(lr=0.1))
    >>> schedule = StepLR(wrapper, step_size=2, gamma=0.5)
    >>> for _ in range(3):
    ...     schedule.step()
    >>> wrapper.get_lr()
    {'lr': [0.05]}

    Args:
      optimizer: the optimizer wrapper, or any object with `param_groups`.
      param_name: the value to schedule: 'lr', 'weight_decay', ...; for an optimizer with `betas`, 'momentum' is the
        first of these.
      settings: family settings, a `Rule`.
      begin: first step of the schedule, in epochs or iterations (see `by_epoch`).
      end: the step after the last one.
      last_step: the last completed step since `begin`, to continue without a saved state; -1 to start.
      by_epoch: whether steps are epochs; otherwise iterations.
      verbose: log every new value.

    Attributes:
      ends_with_run: whether `end` was not given, so that it is the end of the run, also for a resumed longer run.
      epoch_length: iterations per epoch, for settings that were converted from epochs; None for others.

    Raises:
      ConfigError: `end` is not after `begin`, or `last_step` is below -1. KeyError: no group has `param_name`.
    """

    need_val_args: ClassVar[bool] = False  # its step takes validation metrics
    mirrors_betas: ClassVar[bool] = False  # 'momentum' is written back into betas[0]
    skips_zero: ClassVar[bool] = False  # groups whose initial value is 0 keep it
    family: ClassVar[type[Any]]  # the dataclass for the settings
    _frozen_steps = 0  # steps at the start of a warm-up from 0, in which values are hidden

    def __init__(
        self,
        optimizer: Groups,
        param_name: str,
        settings: ScheduleSettings,
        begin: float = 0,
        end: float = INF,
        last_step: int = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        if end <= begin:
            raise ConfigError(f"`end` must be larger than `begin`, got begin={begin} and end={end}")
        self.optimizer = optimizer
        self.param_name = param_name
        self.settings: Any = settings  # a `Rule`, except in subclasses that override `step`
        self.begin, self.end, self.by_epoch = begin, end, by_epoch
        self.verbose = verbose
        self.ends_with_run = False
        self.epoch_length: int | None = None
        self._lowest, self._highest = _RANGES.get(param_name, (-_MAX, _MAX))
        default = default_group(optimizer)
        # with several groups, the optimizer's own settings are one more group, so that multipliers keep a reference
        is_separate = not any(group is default for group in optimizer.param_groups)
        self._default_group = default if is_separate else None
        self.base_values = self._record_initial_values(resumed=last_step > -1)
        self._bind()
        self.last_step = last_step
        # One before the first step, as `step` below counts it.
        self.global_step = -1 if last_step == -1 else int(begin) + last_step
        self.step()

    @classmethod
    def build_iter_from_epoch(cls, *args: Any, epoch_length: int | None = None, **kwargs: Any) -> "ParamScheduler":
        """Build the scheduler from settings in epochs, converted to iterations.

        Args:
          *args: as for the constructor.
          epoch_length: iterations per epoch.
          **kwargs: as for the constructor; `by_epoch` must be true.

        Raises:
          ArgumentError: `by_epoch` is false, or `epoch_length` is not a positive integer.
          NotImplementedError: the family cannot be converted.
        """
        if cls.family.epoch_units is None:
            raise NotImplementedError(f"{cls.__name__} cannot be converted from epochs to iterations")
        if not kwargs.get("by_epoch", True):
            raise ArgumentError(f"`by_epoch` must be True to convert {cls.__name__} to iterations, got False")
        if not isinstance(epoch_length, int) or epoch_length <= 0:
            raise ArgumentError(f"`epoch_length` must be a positive number of iterations, got {epoch_length}")
        for name in cls.family.epoch_units:
            # Milestones and periods are lists in epochs; factors and weights beside them are not, and have no unit to
            # convert.
            if isinstance(value := kwargs.get(name), list | tuple):
                kwargs[name] = [item * epoch_length for item in value]
            elif value is not None:
                kwargs[name] = value * epoch_length
        for name in ("begin", "end"):
            if kwargs.get(name, INF) != INF:
                kwargs[name] = int(kwargs[name] * epoch_length)
        scheduler = cls(*args, **{**kwargs, "by_epoch": False})
        scheduler.epoch_length = epoch_length
        return scheduler

    def step(self) -> None:
        """Count an iteration or epoch; from `begin` to `end`, set the next value in every scheduled group.

        Raises:
          ConfigError: a value is negative, infinite or NaN, or a momentum above 1; the group keeps the last one.
        """
        # A run calls this once per iteration and schedule, between two compiled steps: keep the common path short.
        self.global_step = now = self.global_step + 1
        if not self.begin <= now < self.end:
            return
        self.last_step = t = self.last_step + 1
        change = self._change(t)
        if change is None:
            return
        a, b, c = change
        name, special = self.param_name, t <= self._special_until
        lowest, highest = self._lowest, self._highest
        groups = self.optimizer.param_groups if self._default_group is None else self._groups()
        for index, initial, target in self._scheduled:
            group = groups[index]
            value = group[name]
            if special or type(value) is Frozen:
                self._apply_special(group, t, change, initial, target)
                continue
            value = a * value + b * target + c * initial
            if not lowest <= value <= highest:  # also NaN
                raise self._value_error(value)
            group[name] = value
        if self.verbose:
            self._log_values()

    @property
    def num_groups(self) -> int:
        """The number of groups that it changes."""
        return len(self._scheduled)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the scheduler and the group values as they are now."""
        # Shallow copies suffice: a step replaces values and never changes one in place.
        own, groups = dict(vars(self)), [(group, dict(group)) for group in self._groups()]

        def restore() -> None:
            vars(self).update(own)
            for group, values in groups:
                group.update(values)

        return restore

    def get_last_value(self) -> list[float]:
        """Return the current value of each group that has it."""
        return [float(group[self.param_name]) for group in self._groups() if self.param_name in group]

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, the settings and, during a warm-up from 0, the hidden values, JSON-serializable."""
        state: dict[str, Any] = {
            "global_step": self.global_step,
            "last_step": self.last_step,
            "settings": {
                "type": type(self).__name__,
                "param_name": self.param_name,
                "begin": self.begin,
                "end": self.end,
                "by_epoch": self.by_epoch,
                **self.settings.state_dict(),
                "base_values": list(self.base_values),
            },
            "ends_with_run": self.ends_with_run,
            "epoch_length": self.epoch_length,
        }
        if 0 <= self.last_step < self._frozen_steps:
            groups = self._groups()
            values = [groups[scheduled.group_index][self.param_name] for scheduled in self._scheduled]
            # The groups in the checkpoint have 0 here, from which no value could be restored.
            state["hidden"] = [v.hidden if isinstance(v, Frozen) else float(v) for v in values]
        return state

    def load_state_dict(self, state: dict[str, Any], settings: str = "checkpoint") -> None:
        """Restore `state`. Load the optimizer wrapper's state first, which holds the values.

        Args:
          state: the result of `state_dict`.
          settings: which settings to use from now on: those in `state` ('checkpoint') or the constructor's ('config';
            `replay_schedulers` then sets the values that these settings give). A schedule that ends with the run, here
            and in `state`, keeps this run's end. One that is converted from epochs of another length keeps its
            settings.
        """
        self.global_step = state["global_step"]
        self.last_step = state["last_step"]
        saved = state.get("settings")
        # The position above is taken over in any case; the shape of the schedule only if it means the same in this run.
        if settings != "config" and saved is not None and not self.has_other_epochs(state):
            self.check_type(state)
            self.settings = self.settings.load_state_dict(saved)
            if not self.keeps_end(state):
                self.end, self.ends_with_run = saved["end"], state.get("ends_with_run", False)
            self.begin, self.by_epoch = saved["begin"], saved["by_epoch"]
            self.base_values = list(saved["base_values"])
            self._bind()
        # A warm-up from 0 leaves 0 in the groups; the value behind it, from which the ratios go on, is stored
        # separately.
        if "hidden" in state and 0 <= self.last_step < self._frozen_steps:
            groups = self._groups()
            for scheduled, hidden in zip(self._scheduled, state["hidden"], strict=True):
                self._write(groups[scheduled.group_index], Frozen(hidden))

    def check_type(self, state: dict[str, Any]) -> None:
        """Raise ConfigError unless the settings in `state`, a result of `state_dict`, are for this scheduler type."""
        saved = state["settings"]
        if saved["type"] != type(self).__name__ or saved["param_name"] != self.param_name:
            raise ConfigError(
                f"the scheduler of the checkpoint must be {type(self).__name__} of {self.param_name!r} as in the "
                f"config, got {saved['type']} of {saved['param_name']!r}; to use that of the config, set "
                "resume_policy.schedules='config'"
            )

    def keeps_end(self, state: dict[str, Any]) -> bool:
        """Return whether the schedule ends with its run both here and in `state`, a result of `state_dict`."""
        saved = state["settings"]
        is_same_unit = saved["by_epoch"] == self.by_epoch and saved["begin"] < self.end
        return self.ends_with_run and state.get("ends_with_run", False) and is_same_unit

    def has_other_epochs(self, state: dict[str, Any]) -> bool:
        """Return whether the schedule is converted from another epoch length than in `state`."""
        return self.epoch_length != state.get("epoch_length", self.epoch_length)

    def reset_initial_values(self) -> None:
        """Record the current group values as the initial ones, from which `rewind` starts."""
        for group in self._groups():
            group.pop(f"initial_{self.param_name}", None)
        self.base_values = self._record_initial_values(resumed=False)
        self._bind()

    def rewind(self) -> None:
        """Restore the initial values and reset the counters; the next `step` is the first one."""
        groups = self._groups()
        self.global_step = self.last_step = -1
        for scheduled in self._scheduled:
            groups[scheduled.group_index][f"initial_{self.param_name}"] = scheduled.initial
            self._write(groups[scheduled.group_index], scheduled.initial)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings}, begin={self.begin}, end={self.end}, by_epoch={self.by_epoch})"

    def _bind(self) -> None:
        """Compute what depends on the settings only: the scheduled groups with targets."""
        groups = self._groups()
        if len(groups) != len(self.base_values):
            raise ConfigError(
                f"the optimizer must have the {len(self.base_values)} parameter groups of the saved schedule, got "
                f"{len(groups)}"
            )
        targets = self._bind_settings()
        self._scheduled = [
            ScheduledGroup(index, value, targets[index])
            for index, value in enumerate(self.base_values)
            if value is not None
            # A minimum above 0 would give a weight decay to the parameters that have none, such as biases.
            and not (self.skips_zero and value == 0.0)
            and not (self.param_name == "lr" and groups[index].get("fix_lr"))
        ]
        for index, initial, _ in self._scheduled:
            groups[index][f"initial_{self.param_name}"] = initial

    def _bind_settings(self) -> list[float]:
        """Bind the rule to the number of steps; return the target of each group."""
        num_steps, rule = int(self.end - self.begin), self.settings
        values = [0.0 if value is None else value for value in self.base_values]
        present = [value for value in self.base_values if value is not None]
        initial_values = rule.initial_values(values)
        # Some rules start elsewhere (one-cycle); what they start from becomes the initial value of later schedulers
        # too.
        self.base_values = [
            None if old is None else new for old, new in zip(self.base_values, initial_values, strict=True)
        ]
        self._change = rule.bind(num_steps)
        self._frozen_steps, self._min_value = rule.frozen_steps(num_steps), rule.min_value()
        has_betas = self.mirrors_betas and any("betas" in group for group in self._groups())
        # Only these need a second look at each value written; the others take the short path of `step`.
        special = self._min_value > -math.inf or has_betas
        self._special_until = math.inf if special else self._frozen_steps or -1
        # The optimizer's own settings are the last group: their initial value has no multiplier.
        return rule.targets(values, present[-1] if default_group(self.optimizer) else present[0])

    def _apply_special(self, group: Group, t: int, change: Affine, initial: float, target: float) -> None:
        """Apply the change to a value that is frozen, has a lower bound, or is mirrored in `betas`."""
        value = group[self.param_name]
        is_frozen = type(value) is Frozen
        is_restored = t == self._frozen_steps > 0
        if is_frozen:
            value = value.hidden
        elif is_restored and value == 0.0:
            value = initial  # the hidden value was lost in a checkpoint that stores plain numbers
        a, b, c = change
        value = max(a * value + b * target + c * initial, self._min_value)
        if not self._lowest <= value <= self._highest:
            raise self._value_error(value)
        self._write(group, Frozen(value) if t < self._frozen_steps or (is_frozen and not is_restored) else value)

    def _groups(self) -> Sequence[Group]:
        groups = self.optimizer.param_groups
        return groups if self._default_group is None else [*groups, self._default_group]

    def _write(self, group: Group, value: float) -> None:
        group[self.param_name] = value
        if self.mirrors_betas and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

    def _value_error(self, value: float) -> ConfigError:
        """Return the error for a value outside the hyperparameter's range."""
        legal = "finite"
        if self.param_name in _RANGES:
            legal = "from 0 to 1" if self.param_name == "momentum" else "finite and at least 0"
        when = f"{'epoch' if self.by_epoch else 'iteration'} {self.global_step + 1}"
        return ConfigError(f"`{self.param_name}` must be {legal}, got {value:g} from {type(self).__name__} in {when}")

    def _record_initial_values(self, resumed: bool) -> list[float | None]:
        """Return the initial value of each group, None if it has no such value; the first scheduler records them."""
        name, key, groups = self.param_name, f"initial_{self.param_name}", self._groups()
        if self.mirrors_betas:
            if not any("momentum" in group or "betas" in group for group in groups):
                raise ConfigError("a momentum schedule must have an optimizer with `momentum` or `betas`, got neither")
            for group in groups:
                # MMEngine schedules `momentum`, which Adam does not have; the first beta follows it, see `_write`.
                if "betas" in group:
                    group["momentum"] = float(group["betas"][0])
        if not any(name in group for group in groups):
            names = {other for group in groups for other, value in group.items() if is_host_number(value)}
            raise UnknownNameError(
                f"`param_name` must be a value of a parameter group, got {name!r}{closest(name, names)}"
            )
        values: list[float | None] = []
        for index, group in enumerate(groups):
            if name in group and not is_host_number(group[name]):
                raise ConfigError(f"`{name}` of a parameter group must be a number, got {group[name]!r}")
            # The first scheduler of a value records it; later ones in the chain refer to the same initial value.
            if name in group and key not in group:
                if resumed:
                    raise UnknownNameError(f"`last_step` must be -1 unless the groups have {key!r}, got group {index}")
                group[key] = float(group[name])
            values.append(float(group[key]) if name in group else None)
        return values

    def _log_values(self) -> None:
        for index, value in enumerate(self.get_last_value()):
            _LOGGER.info("Adjusting %s of group %d to %.4e", self.param_name, index, value)


Schedulers = list[ParamScheduler] | dict[str, list[ParamScheduler]]


def flatten_schedulers(schedulers: Schedulers | None) -> Sequence[ParamScheduler]:
    """Return all schedulers of a run in one list, for one or several optimizers."""
    if schedulers is None:
        return []
    return [s for group in schedulers.values() for s in group] if isinstance(schedulers, dict) else schedulers


def default_group(optimizer: Groups) -> Group | None:
    """Return the group with the optimizer's own settings; None if the object has no such group."""
    return getattr(optimizer, "base_param_settings", None)
