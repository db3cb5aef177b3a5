"""Step the parameter schedulers."""

from collections.abc import Iterator, Mapping
from typing import Any

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class ParamSchedulerHook(Hook):
    """Step each scheduler of the runner when its unit of time is over.

    Schedulers with `by_epoch=False` step after every iteration, the others after every epoch; those that follow a
    metric get the metrics after every validation. Hyperparameters that they change are inputs of the compiled step.
    """

    priority = "LOW"
    runs_ahead = True

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Step the schedulers that count iterations."""
        schedulers = runner.param_schedulers
        for scheduler in schedulers if type(schedulers) is list else _all(runner):
            if not scheduler.by_epoch:
                scheduler.step()

    def after_train_epoch(self, runner: Runner) -> None:
        """Step the schedulers that count epochs."""
        for scheduler in _all(runner):
            if scheduler.by_epoch:
                scheduler.step()

    def after_val_epoch(self, runner: Runner, metrics: dict[str, float] | None = None) -> None:
        """Pass the metrics to the schedulers that follow one."""
        for scheduler in _all(runner):
            if scheduler.by_epoch and getattr(scheduler, "need_val_args", False):
                scheduler.step(metrics)


def _all(runner: Runner) -> Iterator[Any]:
    """Yield every scheduler of the runner, of all optimizers."""
    schedulers = runner.param_schedulers
    if schedulers is None:
        return
    if isinstance(schedulers, list):
        yield from schedulers
    elif isinstance(schedulers, dict):
        for of_one in schedulers.values():
            yield from of_one
    else:
        raise TypeError(
            f"runner.param_schedulers must be a list, or a dict of lists for several optimizers, "
            f"got {type(schedulers).__name__}"
        )
