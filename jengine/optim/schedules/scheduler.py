"""Define the base class of parameter schedulers: the active range, the counters, the groups, and the saved state.

A scheduler runs on the host. It writes Python floats into the parameter groups of the optimizer wrapper; the compiled
step receives them as inputs, so that a schedule costs no device work and no recompilation.
"""

import logging
import numbers
from collections.abc import Callable, MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jengine.errors import ArgumentError, ConfigError, UnknownNameError, closest
from jengine.optim.schedules.rules import INF, scale_epochs

Group = MutableMapping[str, Any]  # a parameter group: host numbers by name
_LOGGER = logging.getLogger("jengine")
_MAX = 3.4028235e38  # of float32, the dtype of hyperparameters on the device
_ROUNDING = 1e-12
_RANGES = {"lr": (-_ROUNDING, _MAX), "weight_decay": (-_ROUNDING, _MAX), "momentum": (-_ROUNDING, 1 + _ROUNDING)}


class Groups(Protocol):
    """Describe the part of an optimizer wrapper that a scheduler uses.

    It may also have `base_param_settings`, a group (or None) with the optimizer's own settings; see `default_group`.
    """

    @property
    def param_groups(self) -> Sequence[Group]:
        """Mappings of host numbers by name (`lr`, `momentum`, ...)."""


class ScheduledGroup(NamedTuple):
    """Describe a parameter group that a scheduler changes."""

    group_index: int  # position in the list of groups
    initial: float  # initial value
    target: float  # constant of the group that the rule moves the value towards


class ParamScheduler:
    """Schedule one named value of the parameter groups.

    The constructor records the initial value of each group under `initial_<param_name>` and sets the value of the first
    iteration. Each `step` counts and, from `begin` to `end`, computes the next value from the current one, so that
    several schedulers chain in list order. After `end` the last value stays. Learning rate schedules skip groups whose
    `fix_lr` is true.

    Args:
      optimizer: the optimizer wrapper, or any object with its `param_groups`.
      param_name: the value to schedule: 'lr', 'weight_decay', ...; for an optimizer with `betas`, 'momentum' is the
        first of these.
      settings: the settings of the family, a frozen dataclass.
      begin: first step of the schedule, in epochs or iterations (see `by_epoch`).
      end: the step after the last one.
      last_step: the last completed step since `begin`, to continue without a saved state; -1 to start.
      by_epoch: whether steps are epochs; otherwise iterations.
      verbose: log every new value.

    Attributes:
      ends_with_run: whether `end` was not given, so that it is the end of the run, also of a resumed longer run.
      epoch_length: iterations in an epoch, for settings that were converted from epochs; None for others.

    Raises:
      ConfigError: `end` is not after `begin`, or `last_step` is below -1. KeyError: no group has `param_name`.
    """

    need_val_args: ClassVar[bool] = False  # its step takes the metrics of a validation
    mirrors_betas: ClassVar[bool] = False  # 'momentum' is written back into betas[0]
    skips_zero: ClassVar[bool] = False  # groups whose initial value is 0 keep it
    family: ClassVar[type[Any]]  # the dataclass of the settings

    def __init__(
        self,
        optimizer: Groups,
        param_name: str,
        settings: Any,
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
        self.settings = settings
        self.begin, self.end, self.by_epoch = begin, end, by_epoch
        self.verbose = verbose
        self.ends_with_run = False
        self.epoch_length: int | None = None
        self._lowest, self._highest = _RANGES.get(param_name, (-_MAX, _MAX))
        default = default_group(optimizer)
        is_separate = not any(group is default for group in optimizer.param_groups)
        self._default_group = default if is_separate else None
        self.base_values = self._record_initial_values(resumed=last_step > -1)
        self._bind()
        self.last_step = last_step
        self.global_step = -1 if last_step == -1 else int(begin) + last_step
        self.step()

    @classmethod
    def build_iter_from_epoch(cls, *args: Any, epoch_length: int | None = None, **kwargs: Any) -> "ParamScheduler":
        """Build the scheduler from settings in epochs, converted to iterations.

        Args:
          *args: as for the constructor.
          epoch_length: iterations in an epoch.
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
        kwargs = scale_epochs(kwargs, cls.family.epoch_units, epoch_length)
        for name in ("begin", "end"):
            if kwargs.get(name, INF) != INF:
                kwargs[name] = int(kwargs[name] * epoch_length)
        scheduler = cls(*args, **{**kwargs, "by_epoch": False})
        scheduler.epoch_length = epoch_length
        return scheduler

    def step(self) -> None:
        """Count an iteration or epoch; from `begin` to `end`, set the next value of every scheduled group."""
        raise NotImplementedError

    @property
    def num_groups(self) -> int:
        """The number of groups that it changes."""
        return len(self._scheduled)

    def snapshot(self) -> Callable[[], None]:
        """Return a function that restores the scheduler and the values of the groups as they are now."""
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
        """Return the counters and the settings, as JSON-serializable values."""
        return {
            "global_step": self.global_step,
            "last_step": self.last_step,
            "settings": self._describe(),
            "ends_with_run": self.ends_with_run,
            "epoch_length": self.epoch_length,
        }

    def load_state_dict(self, state: dict[str, Any], settings: str = "checkpoint") -> None:
        """Restore `state`. First load the state of the optimizer wrapper, which holds the values.

        Args:
          state: the result of `state_dict`.
          settings: which settings to use from now on: those in `state` ('checkpoint') or those of the constructor
            ('config'; `replay_schedulers` then sets the values that these settings give). A schedule that ends with
            the run, here and in `state`, keeps the end of this run. One that is converted from epochs of another length
            keeps its settings.

        Raises:
          ConfigError: the state belongs to another type of scheduler, whose settings cannot be loaded.
        """
        self.global_step = state["global_step"]
        self.last_step = state["last_step"]
        saved = state.get("settings")
        if settings == "config" or saved is None or self.has_other_epochs(state):
            return
        self.check_type(state)
        self.settings = self.settings.load_state_dict(saved)
        if not self.keeps_end(state):
            self.end, self.ends_with_run = saved["end"], state.get("ends_with_run", False)
        self.begin, self.by_epoch = saved["begin"], saved["by_epoch"]
        self.base_values = list(saved["base_values"])
        self._bind()

    def check_type(self, state: dict[str, Any]) -> None:
        """Raise ConfigError unless the settings in `state`, a result of `state_dict`, are of this type of scheduler."""
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
        """Return whether the schedule is converted from epochs of another length than in `state`."""
        return self.epoch_length != state.get("epoch_length", self.epoch_length)

    def reset_initial_values(self) -> None:
        """Record the current values of the groups as the initial ones, from which `rewind` starts."""
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
        """Compute what depends on the settings only: the scheduled groups, their initial values and targets."""
        groups = self._groups()
        if len(groups) != len(self.base_values):
            raise ConfigError(
                f"the optimizer must have the {len(self.base_values)} parameter groups of the saved schedule, got "
                f"{len(groups)}"
            )
        self._scheduled = [
            ScheduledGroup(index, value, 0.0)
            for index, value in enumerate(self.base_values)
            if value is not None
            and not (self.skips_zero and value == 0.0)
            and not (self.param_name == "lr" and groups[index].get("fix_lr"))
        ]

    def _groups(self) -> Sequence[Group]:
        groups = self.optimizer.param_groups
        return groups if self._default_group is None else [*groups, self._default_group]

    def _write(self, group: Group, value: float) -> None:
        group[self.param_name] = value
        if self.mirrors_betas and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

    def _value_error(self, value: float) -> ConfigError:
        """Return the error for a value outside the range of the hyperparameter."""
        legal = "finite"
        if self.param_name in _RANGES:
            legal = "from 0 to 1" if self.param_name == "momentum" else "finite and at least 0"
        when = f"{'epoch' if self.by_epoch else 'iteration'} {self.global_step + 1}"
        return ConfigError(f"`{self.param_name}` must be {legal}, got {value:g} from {type(self).__name__} in {when}")

    def _record_initial_values(self, resumed: bool) -> list[float | None]:
        """Return the initial value of each group, None if it has no such value; the first scheduler records them."""
        key = f"initial_{self.param_name}"
        groups = self._groups()
        if self.mirrors_betas:
            self._mirror_betas()
        if not any(self.param_name in group for group in groups):
            names = {name for group in groups for name, value in group.items() if _is_number(value)}
            raise UnknownNameError(
                f"`param_name` must be a value of a parameter group, got {self.param_name!r}"
                f"{closest(self.param_name, names)}"
            )
        values: list[float | None] = []
        for index, group in enumerate(groups):
            if self.param_name not in group:
                values.append(None)
                continue
            if not _is_number(group[self.param_name]):
                raise ConfigError(
                    f"`{self.param_name}` of a parameter group must be a number, got {group[self.param_name]!r}"
                )
            if key not in group:
                if resumed:
                    raise UnknownNameError(f"`last_step` must be -1 unless the groups have {key!r}, got group {index}")
                group[key] = float(group[self.param_name])
            values.append(float(group[key]))
        return values

    def _mirror_betas(self) -> None:
        groups = self._groups()
        if not any("momentum" in group or "betas" in group for group in groups):
            raise ConfigError("a momentum schedule must have an optimizer with `momentum` or `betas`, got neither")
        for group in groups:
            if "betas" in group:
                group["momentum"] = float(group["betas"][0])

    def _describe(self) -> dict[str, Any]:
        return {
            "type": type(self).__name__,
            "param_name": self.param_name,
            "begin": self.begin,
            "end": self.end,
            "by_epoch": self.by_epoch,
            **self.settings.state_dict(),
            "base_values": list(self.base_values),
        }

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
    """Return the group of the optimizer's own settings; None if the object has no such group."""
    return getattr(optimizer, "base_param_settings", None)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
