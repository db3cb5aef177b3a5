"""Keeps the learning rate of SimSiam's predictor where it is while the others follow their schedule."""

from typing import Any

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.optim.schedules import flatten_schedulers
from jengine.registry import HOOKS


@HOOKS.register_module()
class SimSiamHook(Hook):
    """Sets the learning rate of every parameter group whose `fix_lr` is true (Chen and He, 2021, arXiv:2011.10566).

    Groups are marked in the optimizer wrapper: `custom_keys={'predictor': dict(fix_lr=True)}`. Schedules leave marked
    groups out, so that nothing drifts between two calls of this hook, whatever unit they count in.

    Args:
      fix_pred_lr: whether to fix it. False: the marks are taken away, and all groups follow the schedules.
      lr: the learning rate of the marked groups.
      adjust_by_epoch: set it before each epoch; False: before each iteration too.

    Raises:
      AssertionError: at the beginning of the run, if no group is marked.
    """

    runs_ahead = True

    def __init__(self, fix_pred_lr: bool, lr: float, adjust_by_epoch: bool = True) -> None:
        self.fix_pred_lr = fix_pred_lr
        self.lr = lr
        self.adjust_by_epoch = adjust_by_epoch

    def before_run(self, runner: Runner) -> None:
        """Holds that there is something to fix, or hands the groups back to the schedules."""
        if runner.optim_wrapper is None:
            return
        marked = self._marked(runner)
        if not self.fix_pred_lr:
            for group in marked:
                group["fix_lr"] = False
            if marked:
                _restart([*flatten_schedulers(runner.param_schedulers)])
        elif not marked:
            raise AssertionError(
                "SimSiamHook: no parameter group has fix_lr=True; mark the predictor's in the optim_wrapper: "
                "paramwise_cfg=dict(custom_keys={'predictor': dict(fix_lr=True)})"
            )

    def before_train_epoch(self, runner: Runner) -> None:
        """Sets the rate."""
        self._fix(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Sets the rate, unless once an epoch is enough."""
        if not self.adjust_by_epoch:
            self._fix(runner)

    def _fix(self, runner: Runner) -> None:
        if self.fix_pred_lr:
            for group in self._marked(runner):
                group["lr"] = self.lr

    @staticmethod
    def _marked(runner: Runner) -> list[Any]:
        groups = runner.optim_wrapper.param_groups
        if isinstance(groups, dict):  # several optimizers, by name
            groups = [group for of_one in groups.values() for group in of_one]
        return [group for group in groups if group.get("fix_lr")]


def _restart(schedulers: list[Any]) -> None:
    """Starts schedules anew for the groups as they are marked now; a resume comes later and goes on from there."""
    for scheduler in schedulers:
        scheduler.rewind()
    for scheduler in schedulers:
        scheduler.load_state_dict(scheduler.state_dict())  # works out anew which groups it drives
        if not scheduler.need_val_args:
            scheduler.step()
