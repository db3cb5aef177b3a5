"""Hyperparameters that the parameter schedulers set ahead of each step."""

from collections.abc import Sequence
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.optim.schedules.scheduler import flatten_schedulers


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Stepping of the parameter schedulers.

    Schedulers with `by_epoch=False` step after every iteration, the others after every epoch; those
    that follow a metric receive the metrics after every validation. Hyperparameters are inputs of
    the compiled step.
    """

    priority = "LOW"
    is_single = True
    acts_on = "hyperparams"

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Step the schedulers that count iterations."""
        schedulers = runner.param_schedulers
        # The usual case needs no call: this runs in each iteration.
        for scheduler in schedulers if type(schedulers) is list else _list_schedulers(runner):
            if not scheduler.by_epoch:
                try:
                    scheduler.step()
                except ConfigError:  # an illegal value, which nothing uses after the last iteration
                    if runner.iter + 1 < runner.max_iters:
                        raise

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in _list_schedulers(runner):
            if scheduler.by_epoch:
                try:
                    scheduler.step()
                except ConfigError:
                    if runner.epoch + 1 < runner.max_epochs:
                        raise

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Pass the metrics to the schedulers that follow one."""
        for scheduler in _list_schedulers(runner):
            is_due = scheduler.by_epoch and scheduler.need_val_args
            if is_due and not self.is_left_out(runner, scheduler.settings.monitor):
                scheduler.step(metrics)


def _list_schedulers(runner: RunnerProtocol) -> Sequence[Any]:
    """Return the schedulers of all optimizers."""
    schedulers = runner.param_schedulers
    if schedulers is not None and not isinstance(schedulers, list | dict):
        raise TypeError(
            f"runner.param_schedulers must be a list, or a dict of lists for several optimizers, "
            f"got {type(schedulers).__name__}"
        )
    return flatten_schedulers(schedulers)
