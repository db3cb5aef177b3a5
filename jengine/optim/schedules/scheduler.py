"""What all parameter schedulers share: the window, the counters, the groups that they drive, and the saved state.

A scheduler lives on the host. It writes Python floats into the optimizer wrapper's parameter groups; the compiled step
receives them as inputs, so that a schedule costs no device work and no second trace.
"""

import logging
import numbers
from collections.abc import MutableMapping, Sequence
from typing import Any, ClassVar, NamedTuple, Protocol

from jengine.errors import ConfigError, UnknownNameError, closest
from jengine.optim.schedules.rules import INF, scale_epochs

Group = MutableMapping[str, Any]  # a parameter group: host numbers by name
_LOGGER = logging.getLogger("jengine")


class Groups(Protocol):
    """What a scheduler needs of an optimizer wrapper.

    It may also have `base_param_settings`, a group (or None) with the optimizer's own settings, scheduled as well.
    """

    @property
    def param_groups(self) -> Sequence[Group]:
        """Mappings of host numbers by name (`lr`, `momentum`, ...)."""


class Driven(NamedTuple):
    """A group that a scheduler drives."""

    place: int  # among the groups
    base: float  # its initial value
    anchor: float  # the constant of the group that the rule works towards


class ParamScheduler:
    """A schedule of one named value of the parameter groups.

    Building it records the initial value of each group under `initial_<param_name>` and applies the value of the first
    iteration; each `step` counts, and inside the window computes the next value from the current one, so that several
    schedulers chain in the order of their list. After the window the last value stays. A group whose `fix_lr` is true
    is left out of learning rate schedules.

    Args:
      optimizer: the optimizer wrapper, or anything with its `param_groups`.
      param_name: the value to drive: 'lr', 'weight_decay', ...; 'momentum' stands for the first of `betas` where an
        optimizer has those.
      settings: the settings of the family, a frozen dataclass.
      begin: first step of the window, in epochs or iterations as `by_epoch` says.
      end: the step after the window.
      last_step: the last step done inside the window, to go on without a saved state; -1 starts.
      by_epoch: steps are epochs, otherwise iterations.
      verbose: log every new value.

    Raises:
      ValueError: an empty window, or `last_step` below -1. KeyError: no group has `param_name`.
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
            raise ConfigError(f"`end` must be larger than begin={begin}, got {end}")
        self.optimizer = optimizer
        self.param_name = param_name
        self.settings = settings
        self.begin, self.end, self.by_epoch = begin, end, by_epoch
        self.verbose = verbose
        self._shadow = _apart(optimizer)
        self.base_values = self._take_initial_values(resumed=last_step > -1)
        self._bind()
        self.last_step = last_step
        self.global_step = -1 if last_step == -1 else int(begin) + last_step
        self.step()

    @classmethod
    def build_iter_from_epoch(cls, *args: Any, epoch_length: int | None = None, **kwargs: Any) -> "ParamScheduler":
        """Builds the scheduler with everything that its settings count in epochs counted in iterations.

        Args:
          *args: as for the constructor.
          epoch_length: iterations in an epoch.
          **kwargs: as for the constructor; `by_epoch` must be true.

        Raises:
          AssertionError: `by_epoch` is false, or `epoch_length` is not a positive number.
          NotImplementedError: the family cannot be converted.
        """
        if cls.family.epoch_units is None:
            raise NotImplementedError(f"{cls.__name__} cannot be converted from epochs to iterations")
        if not kwargs.get("by_epoch", True):
            raise AssertionError(f"{cls.__name__} counts iterations already (by_epoch=False): nothing to convert")
        if not isinstance(epoch_length, int) or epoch_length <= 0:
            raise AssertionError(
                f"a conversion to iterations needs the epoch's length in iterations, found {epoch_length}"
            )
        kwargs = scale_epochs(kwargs, cls.family.epoch_units, epoch_length)
        for name in ("begin", "end"):
            if kwargs.get(name, INF) != INF:
                kwargs[name] = int(kwargs[name] * epoch_length)
        return cls(*args, **{**kwargs, "by_epoch": False})

    def step(self) -> None:
        """Counts one iteration or epoch and, inside the window, sets the next value of every driven group."""
        raise NotImplementedError

    def get_last_value(self) -> list[float]:
        """The value in force of each group that has it."""
        return [float(group[self.param_name]) for group in self._groups() if self.param_name in group]

    def state_dict(self) -> dict[str, Any]:
        """The counters, and the settings for a loader that prefers those of the checkpoint. Fits JSON."""
        return {
            "global_step": self.global_step,
            "last_step": self.last_step,
            "settings": self._describe(),
        }

    def load_state_dict(self, state: dict[str, Any], settings: str = "checkpoint") -> None:
        """Goes on where `state` was taken. Load the state of the optimizer wrapper, which holds the values, before.

        Args:
          state: what `state_dict` gave.
          settings: whose settings hold from here: those in `state` ('checkpoint') or those that the scheduler was
            built with ('config'; then `replay` brings the values to where those settings would have them by now).

        Raises:
          ValueError: the state is one of another type of scheduler, whose settings cannot be taken over.
        """
        self.global_step = state["global_step"]
        self.last_step = state["last_step"]
        saved = state.get("settings")
        if settings == "config" or saved is None:
            return
        if saved["type"] != type(self).__name__ or saved["param_name"] != self.param_name:
            raise ConfigError(
                f"the checkpoint has a {saved['type']} of {saved['param_name']!r} where the config has a "
                f"{type(self).__name__} of {self.param_name!r}; load it with settings='config'"
            )
        self.settings = self.settings.load_state_dict(saved)
        self.begin, self.end, self.by_epoch = saved["begin"], saved["end"], saved["by_epoch"]
        self.base_values = list(saved["base_values"])
        self._bind()

    def rewind(self) -> None:
        """Puts the initial values back and the counters before the first step. `step` then starts anew."""
        groups = self._groups()
        self.global_step = self.last_step = -1
        for driven in self._driven:
            groups[driven.place][f"initial_{self.param_name}"] = driven.base
            self._write(groups[driven.place], driven.base)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.settings}, begin={self.begin}, end={self.end}, by_epoch={self.by_epoch})"

    def _bind(self) -> None:
        """Works out what depends on the settings alone: which groups are driven, from what and towards what."""
        groups = self._groups()
        if len(groups) != len(self.base_values):
            raise ConfigError(
                f"the schedule was saved for {len(self.base_values)} parameter groups, found {len(groups)}"
            )
        self._driven = [
            Driven(index, base, 0.0)
            for index, base in enumerate(self.base_values)
            if base is not None
            and not (self.skips_zero and base == 0.0)
            and not (self.param_name == "lr" and groups[index].get("fix_lr"))
        ]

    def _groups(self) -> Sequence[Group]:
        groups = self.optimizer.param_groups
        return [*groups, self.optimizer.base_param_settings] if self._shadow else groups  # type: ignore[attr-defined]

    def _write(self, group: Group, value: float) -> None:
        group[self.param_name] = value
        if self.mirrors_betas and "betas" in group:
            group["betas"] = (value, *group["betas"][1:])

    def _take_initial_values(self, resumed: bool) -> list[float | None]:
        """The initial value of each group, recorded in the group by the first scheduler; None where it has none."""
        key = f"initial_{self.param_name}"
        groups = self._groups()
        if self.mirrors_betas:
            self._mirror_betas()
        if not any(self.param_name in group for group in groups):
            names = {name for group in groups for name, value in group.items() if _is_number(value)}
            raise UnknownNameError(f"no parameter group has a {self.param_name!r}{closest(self.param_name, names)}")
        values: list[float | None] = []
        for index, group in enumerate(groups):
            if self.param_name not in group:
                values.append(None)
                continue
            if not _is_number(group[self.param_name]):
                raise ConfigError(f"{self.param_name!r} of a parameter group is no number: {group[self.param_name]!r}")
            if key not in group:
                if resumed:
                    raise UnknownNameError(f"last_step goes on with a schedule, but group {index} has no {key!r}")
                group[key] = float(group[self.param_name])
            values.append(float(group[key]))
        return values

    def _mirror_betas(self) -> None:
        groups = self._groups()
        if not any("momentum" in group or "betas" in group for group in groups):
            raise ConfigError("a momentum schedule needs an optimizer with momentum or betas; its groups have neither")
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


def _apart(optimizer: Groups) -> bool:
    """Whether the optimizer's own settings are a group that `param_groups` does not hold."""
    shadow = getattr(optimizer, "base_param_settings", None)
    return shadow is not None and not any(group is shadow for group in optimizer.param_groups)


def _is_number(value: Any) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, bool)
