"""Steps the schedules, and says which learning rate and which momentum were used."""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

from jengine.contrib.imix.hook_base import HookBase
from jengine.hooks.priority import PriorityStatus
from jengine.hooks.runner_protocol import Runner
from jengine.optim.schedules import ParamScheduler, flatten_schedulers
from jengine.registry import HOOKS

_MOMENTUM = "momentum"


@HOOKS.register_module()
class LRSchedulerHook(HookBase):
    """Steps the run's schedulers and records, as `lr`, the rate that the iteration has used.

    It takes the place of ParamSchedulerHook; where the run has a MomentumSchedulerHook, the momentum is left to that.
    Schedulers that count iterations step after each, or after each update of
    the parameters; those that count epochs after each epoch; those that follow a metric get it after a validation.

    Args:
      is_lr_accumulation: with accumulated gradients, step after each update and not after each iteration.
    """

    default_level = PriorityStatus.HIGH
    runs_ahead = True

    def __init__(self, is_lr_accumulation: bool = True) -> None:
        self.is_lr_accumulation = is_lr_accumulation
        self._group = 0

    def before_train(self) -> None:
        """Finds the group whose rate is recorded."""
        groups = self.trainer.optim_wrapper.param_groups
        self._group = best_group([len(group.paths or ()) for group in groups], [group["lr"] for group in groups])

    def after_train_iter(self) -> None:
        """Records the value before it steps."""
        trainer = self.trainer
        trainer.message_hub.update_scalar(*self._used())
        counts = trainer.optim_wrapper.accumulative_counts if self.is_lr_accumulation else 1
        if (trainer.iter + 1) % counts == 0:
            self._step(by_epoch=False)

    def after_train_epoch(self) -> None:
        """Steps what counts epochs."""
        self._step(by_epoch=True)

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Hands the metrics to what follows one."""
        for scheduler in self._schedulers(runner):
            if scheduler.by_epoch and scheduler.need_val_args:
                step: Callable[..., None] = scheduler.step
                step(metrics)

    def _step(self, *, by_epoch: bool) -> None:
        for scheduler in self._schedulers(self.trainer):
            if scheduler.by_epoch is by_epoch:
                scheduler.step()

    def _used(self) -> tuple[str, float]:
        """What is recorded, and the value that the iteration has used."""
        return "train/lr", self.trainer.optim_wrapper.param_groups[self._group]["lr"]

    def _schedulers(self, runner: Runner) -> Iterator[ParamScheduler]:
        """The schedulers that this hook steps."""
        shared = any(isinstance(hook, MomentumSchedulerHook) for hook in runner.hooks)
        for scheduler in flatten_schedulers(runner.param_schedulers):
            if not shared or (scheduler.param_name == _MOMENTUM) is isinstance(self, MomentumSchedulerHook):
                yield scheduler


@HOOKS.register_module()
class MomentumSchedulerHook(LRSchedulerHook):
    """Steps the run's schedulers of the momentum and records, as `momentum`, the one that the iteration has used.

    Of an optimizer with `betas` the first of them is the momentum. When it steps is settled as in LRSchedulerHook.

    Args:
      is_lr_accumulation: with accumulated gradients, step after each update and not after each iteration.
    """

    default_level = PriorityStatus.NORMAL

    def _used(self) -> tuple[str, float]:
        return "train/momentum", self.trainer.optim_wrapper.get_momentum()[_MOMENTUM][self._group]


def best_group(sizes: Sequence[int], rates: Sequence[float]) -> int:
    """The parameter group whose learning rate stands for all.

    Args:
      sizes: how many parameters each group has.
      rates: the learning rate of each.

    Returns:
      The index of the largest group; where each has a single parameter, of the first with the rate that most have.
    """
    largest = max(sizes)
    if largest > 1:
        return list(sizes).index(largest)
    ((most_common, _),) = Counter(rates).most_common(1)
    return list(rates).index(most_common)
