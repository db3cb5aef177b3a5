"""Parameter schedulers: host objects that move one value of the parameter groups along a formula.

The compiled step receives the values as inputs, so that a schedule costs no device work and no
recompilation.
"""

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, ClassVar

from jengine.config.annotations import NonNegative, Positive, Range, is_host_number
from jengine.config.errors import ArgumentError, ConfigError, UnknownNameError, closest
from jengine.optim.schedules.chain import Group, ScheduleChain, chain_of
from jengine.optim.schedules.formulas import INF, Formula

_LOGGER = logging.getLogger("jengine")


class ParamScheduler:
    """Scheduler for one named value in the parameter groups.

    The constructor records the initial value of each group as `initial_<param_name>` and sets the
    value for the first iteration. Each `step` counts and, from `begin` to `end`, sets the next
    value. The schedules of an optimizer are a `ScheduleChain`, in which several chain in list
    order, and which has the value at any step. After `end` the last value stays. Learning rate
    schedules skip groups whose `fix_lr` is true.

    >>> from jengine.optim.optimizers.sgd import SGD
    >>> from jengine.optim.wrapper import OptimWrapper
    >>> from jengine.optim.schedules import StepLR
    >>> wrapper = OptimWrapper(SGD(lr=0.1))
    >>> schedule = StepLR(wrapper, step_size=2, gamma=0.5)
    >>> for _ in range(3):
    ...     schedule.step()
    >>> wrapper.get_lr()
    {'lr': [0.05]}

    Args:
      optimizer: the optimizer wrapper, or any object with `param_groups`.
      param_name: the value to schedule: 'lr', 'weight_decay', ...; for an optimizer with `betas`,
        'momentum' is the first of these.
      settings: family settings, a `Formula`.
      begin: first step of the schedule, in epochs or iterations (see `by_epoch`).
      end: the step after the last one.
      last_step: the last completed step since `begin`, to continue without a saved state; -1 to
        start.
      by_epoch: whether steps are epochs; otherwise iterations.
      verbose: log every new value.

    Attributes:
      chain: the schedules of the optimizer, of which this is one.
      epoch_length: iterations per epoch, for settings that were converted from epochs; None for
        others.
      base_values: the initial value of each group.
      scheduled: whether it changes each group.

    Raises:
      ConfigError: `end` is not after `begin`, or `last_step` is below -1. KeyError: no group has
        `param_name`.
    """

    need_val_args: ClassVar[bool] = False  # its step takes validation metrics
    mirrors_betas: ClassVar[bool] = False  # 'momentum' is written back into betas[0]
    skips_zero: ClassVar[bool] = False  # groups whose initial value is 0 keep it

    def __init__(
        self,
        optimizer: Any,
        param_name: str,
        settings: Formula,
        begin: NonNegative = 0,
        end: Positive = INF,
        last_step: Annotated[int, Range(ge=-1)] = -1,
        by_epoch: bool = True,
        verbose: bool = False,
    ) -> None:
        if end <= begin:
            raise ConfigError(f"`end` must be larger than `begin`, got begin={begin} and end={end}")
        self.chain: ScheduleChain = chain_of(optimizer)
        self.param_name = param_name
        self.settings: Any = settings
        self.begin = begin
        self.end = end
        self.by_epoch = by_epoch
        self.verbose = verbose
        self.epoch_length: int | None = None
        self.base_values: list[float] = []
        self.targets: list[float] = []
        self.scheduled: list[bool] = []
        groups = self.chain.groups
        known = [g for g in groups if param_name in g or (self.mirrors_betas and "betas" in g)]
        if not known:
            advice = (
                "; write optax.adamw(1e-2) as optax.inject_hyperparams(optax.adamw)(1e-2) or "
                "dict(type='AdamW', lr=1e-2), and leave out `param_scheduler` beside "
                "optax.adamw(schedule)"
            )
            raise UnknownNameError(
                f"{type(self).__name__} must have an optimizer with a known `{param_name}`, got "
                f"one without{closest(param_name, groups[0])}{advice if param_name == 'lr' else ''}"
            )
        for group in known:
            if not is_host_number(value := group.get(param_name, 0.0)):
                raise ConfigError(
                    f"`{param_name}` of a parameter group must be a number, got {value!r}"
                )
            if last_step > -1 and f"initial_{param_name}" not in group:
                raise UnknownNameError(
                    f"`last_step` must be -1 unless all groups have 'initial_{param_name}', got "
                    f"{group}"
                )
        self.last_step = last_step
        self.seek(0 if last_step == -1 else int(begin) + last_step + 1)
        self.chain.add(self)

    @classmethod
    def build_iter_from_epoch(
        cls, *args: Any, epoch_length: int | None = None, **kwargs: Any
    ) -> "ParamScheduler":
        """Build the scheduler from settings in epochs, converted to iterations.

        Args:
          *args: as for the constructor.
          epoch_length: iterations per epoch.
          **kwargs: as for the constructor; `by_epoch` must be true.

        Raises: see `convert`.
        """
        scheduler = cls(*args, **kwargs)
        scheduler.convert(epoch_length)
        scheduler.chain.refresh()
        return scheduler

    def convert(self, epoch_length: int | None) -> None:
        """Convert the settings, which are in epochs, to iterations; `refresh` then sets the values.

        Raises:
          ArgumentError: they are in iterations, or `epoch_length` is not a positive integer.
          NotImplementedError: the family cannot be converted.
        """
        name = type(self).__name__
        if self.settings.epoch_units is None:
            raise NotImplementedError(f"{name} cannot be converted from epochs to iterations")
        if not self.by_epoch:
            raise ArgumentError(
                f"`by_epoch` must be True to convert {name} to iterations, got False"
            )
        if not isinstance(epoch_length, int) or epoch_length <= 0:
            raise ArgumentError(
                "`epoch_length`, that of the train dataloader, must be a positive number of "
                f"iterations to convert {name}, got {epoch_length}"
            )
        scaled: dict[str, Any] = {}
        for unit in self.settings.epoch_units:
            # Milestones and periods are in epochs, and may be lists
            if isinstance(value := getattr(self.settings, unit), list | tuple):
                scaled[unit] = [item * epoch_length for item in value]
            elif value is not None:
                scaled[unit] = value * epoch_length
        self.settings = dataclasses.replace(self.settings, **scaled)
        self.begin = int(self.begin * epoch_length)
        if self.end != INF:
            self.end = int(self.end * epoch_length)
        self.by_epoch = False
        self.epoch_length = epoch_length

    def step(self) -> None:
        """Count an iteration or epoch.

        From `begin` to `end`, set the next value in every scheduled group.

        Raises:
          ConfigError: a value is negative, infinite or NaN, or a momentum above 1; the group keeps
            the last one.
        """
        self.global_step += 1
        is_active = self.begin <= self.global_step < self.end
        self.last_step += is_active
        self.chain.advance(self)
        if self.verbose and is_active:
            self._log_values()

    def seek(self, count: int) -> None:
        """Set the counters to `count` completed iterations or epochs.

        `ScheduleChain.refresh` then sets the values.
        """
        self.global_step = count
        self.last_step = max(min(count, math.ceil(self.end) - 1) - math.ceil(self.begin), -1)

    def get_last_value(self) -> list[float]:
        """Return the current value of each group that has it."""
        return [
            float(group[self.param_name]) for group in self.chain.groups if self.param_name in group
        ]

    def state_dict(self) -> dict[str, Any]:
        """Return the counters, and the values that were set by hand, JSON-serializable."""
        return {
            "global_step": self.global_step,
            "by_epoch": self.by_epoch,
            "epoch_length": self.epoch_length,
            "events": self.chain.state_dict(self.param_name),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at the position in `state`, a result of `state_dict`, and set the values.

        The settings stay, so that the values are those of a run that had them from the start.
        """
        self.restore(state)
        self.chain.load_state_dict(state.get("events", ()), self.param_name)
        self.chain.refresh()

    def restore(self, state: dict[str, Any]) -> None:
        """Set the counters; `ScheduleChain.refresh` then sets the values.

        A scheduler that is converted from epochs of another length keeps its place in the epoch.
        """
        scale = (self.epoch_length or 1) / (state.get("epoch_length") or self.epoch_length or 1)
        self.seek(round(state["global_step"] * scale))

    def __repr__(self) -> str:
        return (
            f"{type(self).__name__}({self.settings}, begin={self.begin}, end={self.end}, "
            f"by_epoch={self.by_epoch})"
        )

    def bind(
        self, initials: Sequence[float], reference: float, groups: Mapping[int, Group]
    ) -> Sequence[float]:
        """Bind the formula to the initial value of each group, for the chain.

        Return the initial values after it.

        Args:
          initials: the value of each group; 0 for those that are not in `groups`.
          reference: the initial value in the optimizer's own settings.
          groups: the groups with the value, by index.
        """
        self.base_values = self.settings.initial_values(initials)
        self.targets = self.settings.targets(initials, reference)
        self.scheduled = [
            index in groups
            # A minimum above 0 would give a weight decay to the parameters that have none, such as
            # biases.
            and not (self.skips_zero and value == 0.0)
            and not (self.param_name == "lr" and groups[index].get("fix_lr"))
            for index, value in enumerate(self.base_values)
        ]
        return self.base_values

    def _log_values(self) -> None:
        for index, value in enumerate(self.get_last_value()):
            _LOGGER.info("Adjusting %s of group %d to %.4e", self.param_name, index, value)


Schedulers = list[ParamScheduler] | dict[str, list[ParamScheduler]]


def flatten_schedulers(schedulers: Schedulers | None) -> Sequence[ParamScheduler]:
    """Return all schedulers of a run in one list, for one or several optimizers."""
    if schedulers is None:
        return []
    return (
        [s for group in schedulers.values() for s in group]
        if isinstance(schedulers, dict)
        else schedulers
    )
