"""Constant learning rate for SimSiam's predictor, while the other parameters follow a schedule."""

import dataclasses
from collections.abc import Mapping
from typing import Any

from jengine.config.annotations import NonNegative
from jengine.config.errors import ArgumentError
from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.optim.schedules.chain import chain_of
from jengine.optim.wrapper_dict import wrappers_by_name


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class SimSiamHook(Hook):
    """Hook that sets the learning rate of each parameter group with `fix_lr` (Chen and He, 2021,
    arXiv:2011.10566).

    Mark groups in the optimizer wrapper: `custom_keys={'predictor': dict(fix_lr=True)}`. Schedules,
    by epoch or by iteration, skip marked groups, so that the rate is constant between two calls of
    this hook.

    >>> SimSiamHook(fix_pred_lr=True, lr=0.05).adjust_by_epoch
    True

    Args:
      fix_pred_lr: whether to fix the rate. False removes the marks: all groups follow the
        schedules.
      lr: learning rate for the marked groups.
      adjust_by_epoch: set the rate before each epoch only; False sets it before each iteration too.

    Raises:
      ArgumentError: at the beginning of the run, if no group is marked.
    """

    acts_on = "hyperparams"

    fix_pred_lr: bool
    lr: NonNegative
    adjust_by_epoch: bool = True

    def before_run(self, runner: RunnerProtocol) -> None:
        """Check that a group is marked.

        Without `fix_pred_lr`, return the marked groups to the schedules.
        """
        if runner.optim_wrapper is None:
            return
        groups = _fixed_groups(runner)
        if not self.fix_pred_lr:
            for group in groups:
                group["fix_lr"] = False
            # The schedulers have left out these groups when they were built, see `ParamScheduler`.
            for wrapper in wrappers_by_name(runner.optim_wrapper).values() if groups else ():
                chain_of(wrapper).refresh()
        elif not groups:
            raise ArgumentError(
                "SimSiamHook: a parameter group must have fix_lr=True, got none; mark the "
                "predictor in the "
                "optim_wrapper: paramwise_cfg=dict(custom_keys={'predictor': dict(fix_lr=True)})"
            )

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Set the rate."""
        for group in _fixed_groups(runner) if self.fix_pred_lr else ():
            group["lr"] = self.lr

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Any = None
    ) -> None:
        """Set the rate, unless `adjust_by_epoch`."""
        if not self.adjust_by_epoch:
            self.before_train_epoch(runner)


def _fixed_groups(runner: RunnerProtocol) -> list[Any]:
    by_optimizer = runner.optim_wrapper.param_groups
    if not isinstance(by_optimizer, Mapping):
        by_optimizer = {"": by_optimizer}
    return [group for groups in by_optimizer.values() for group in groups if group.get("fix_lr")]
