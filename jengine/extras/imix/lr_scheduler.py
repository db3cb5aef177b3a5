"""Hooks that step the schedulers and record the learning rate and the momentum of each
iteration.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import ClassVar

from jengine.config.registry import HOOKS
from jengine.extras.imix.hook_base import HookBase
from jengine.extras.imix.levels import PriorityStatus
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.optim.schedules.scheduler import ParamScheduler, flatten_schedulers

_MOMENTUM = "momentum"


@HOOKS.register_module()
class LRSchedulerHook(HookBase):
    """Hook that steps the schedulers and records the learning rate of the iteration as `lr`.

    This hook replaces ParamSchedulerHook. If the run has a MomentumSchedulerHook, that hook steps
    the momentum schedulers. Schedulers by iteration step after each iteration, or after each
    parameter update; schedulers by epoch step after each epoch; schedulers that follow a metric
    receive it after a validation.

    >>> LRSchedulerHook(is_lr_accumulation=False).level.name
    'HIGH'

    Args:
      is_lr_accumulation: with gradient accumulation, step after each update instead of after each
        iteration.
    """

    default_level = PriorityStatus.HIGH
    acts_on = "hyperparams"
    steps_momentum: ClassVar[bool] = False  # in a run with hooks for both

    def __init__(self, is_lr_accumulation: bool = True) -> None:
        self.is_lr_accumulation = is_lr_accumulation
        self._group = 0

    def before_train(self) -> None:
        """Select the group whose learning rate is recorded."""
        groups = self.trainer.optim_wrapper.param_groups
        self._group = select_group(
            [len(group.paths or ()) for group in groups], [group["lr"] for group in groups]
        )

    def after_train_iter(self) -> None:
        """Record the current value, then step the schedulers."""
        trainer = self.trainer
        # before the step: the value that this iteration used
        trainer.message_hub.update_scalar(*self._get_value())
        counts = trainer.optim_wrapper.accumulative_counts if self.is_lr_accumulation else 1
        if (trainer.iter + 1) % counts == 0:
            self._step(by_epoch=False)

    def after_train_epoch(self) -> None:
        """Step the schedulers that count epochs."""
        self._step(by_epoch=True)

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Pass the metrics to the schedulers that follow one."""
        for scheduler in self._schedulers(runner):
            if scheduler.by_epoch and scheduler.need_val_args:
                # only schedulers with `need_val_args` take metrics
                step: Callable[..., None] = scheduler.step
                step(metrics)

    def _step(self, *, by_epoch: bool) -> None:
        for scheduler in self._schedulers(self.trainer):
            if scheduler.by_epoch is by_epoch:
                scheduler.step()

    def _get_value(self) -> tuple[str, float]:
        return "train/lr", self.trainer.optim_wrapper.param_groups[self._group]["lr"]

    def _schedulers(self, runner: RunnerProtocol) -> Iterator[ParamScheduler]:
        has_momentum_hook = any(isinstance(hook, MomentumSchedulerHook) for hook in runner.hooks)
        for scheduler in flatten_schedulers(runner.param_schedulers):
            if not has_momentum_hook or (scheduler.param_name == _MOMENTUM) is self.steps_momentum:
                yield scheduler


@HOOKS.register_module()
class MomentumSchedulerHook(LRSchedulerHook):
    """Hook that steps the momentum schedulers, as LRSchedulerHook, and records the iteration's
    `momentum`.

    For an optimizer with `betas`, the momentum is the first of these.
    """

    default_level = PriorityStatus.NORMAL
    steps_momentum = True

    def _get_value(self) -> tuple[str, float]:
        return "train/momentum", self.trainer.optim_wrapper.get_momentum()[_MOMENTUM][self._group]


def select_group(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """Return the index of the parameter group whose learning rate represents all groups.

    It is the largest group, or if all have a single parameter, the first one with the most common
    rate.

    >>> select_group([1, 5, 2], [0.1, 0.2, 0.1]), select_group([1, 1, 1], [0.1, 0.2, 0.2])
    (1, 1)
    """
    if max(sizes) > 1:
        return list(sizes).index(max(sizes))
    ((most_common, _),) = Counter(rates).most_common(1)
    return list(rates).index(most_common)
