"""Steps the schedules, and says which learning rate was used."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from jengine.hooks.imix.hook_base import HookBase
from jengine.hooks.imix.level import PriorityStatus
from jengine.optim.schedulers import flatten_schedulers
from jengine.registry import HOOKS

if TYPE_CHECKING:
    from jengine.runner import Runner


@HOOKS.register_module()
class LRSchedulerHook(HookBase):
    """Steps the run's schedulers and records, as `lr`, the rate that the iteration has used.

    It takes the place of ParamSchedulerHook. Schedulers that count iterations step after each, or after each update of
    the parameters; those that count epochs after each epoch; those that follow a metric get it after a validation.

    Args:
      is_lr_accumulation: with accumulated gradients, step after each update and not after each iteration.
    """

    default_level = PriorityStatus.HIGH

    def __init__(self, is_lr_accumulation: bool = True) -> None:
        self.is_lr_accumulation = is_lr_accumulation
        self._group = 0

    def before_train(self) -> None:
        """Finds the group whose rate is recorded."""
        groups = self.trainer.optim_wrapper.param_groups
        self._group = best_group([len(group.paths or ()) for group in groups], [group["lr"] for group in groups])

    def after_train_iter(self) -> None:
        """Records the rate before it steps."""
        trainer = self.trainer
        trainer.message_hub.update_scalar("train/lr", trainer.optim_wrapper.param_groups[self._group]["lr"])
        counts = trainer.optim_wrapper.accumulative_counts if self.is_lr_accumulation else 1
        if (trainer.iter + 1) % counts == 0:
            self._step(by_epoch=False)

    def after_train_epoch(self) -> None:
        """Steps what counts epochs."""
        self._step(by_epoch=True)

    def after_val_epoch(self, runner: "Runner", metrics: dict[str, float] | None = None) -> None:
        """Hands the metrics to what follows one."""
        for scheduler in flatten_schedulers(runner.param_schedulers):
            if scheduler.by_epoch and scheduler.need_val_args:
                step: Callable[..., None] = scheduler.step
                step(metrics)

    def _step(self, *, by_epoch: bool) -> None:
        for scheduler in flatten_schedulers(self.trainer.param_schedulers):
            if scheduler.by_epoch is by_epoch:
                scheduler.step()


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
