"""Hyperparameters set ahead of each step, by the parameter schedulers or by a linear warm-up."""

import dataclasses
from collections.abc import Sequence
from typing import Any

from jengine.config.annotations import Finite, Positive
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
    runs_ahead = True

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """Step the schedulers that count iterations."""
        self._step(runner, by_epoch=False, is_last=runner.iter + 1 >= runner.max_iters)

    def after_train_epoch(self, runner: RunnerProtocol) -> None:
        """Step the schedulers that count epochs."""
        self._step(runner, by_epoch=True, is_last=runner.epoch + 1 >= runner.max_epochs)

    def _step(self, runner: RunnerProtocol, *, by_epoch: bool, is_last: bool) -> None:
        for scheduler in _list_schedulers(runner):
            if scheduler.by_epoch is by_epoch:
                try:
                    scheduler.step()
                except ConfigError:  # an illegal value, which nothing uses after the last iteration
                    if not is_last:
                        raise

    def after_val_epoch(
        self, runner: RunnerProtocol, metrics: dict[str, float] | None = None
    ) -> None:
        """Pass the metrics to the schedulers that follow one."""
        for scheduler in _list_schedulers(runner):
            is_due = scheduler.by_epoch and scheduler.need_val_args
            if is_due and not self.is_left_out(runner, scheduler.settings.monitor):
                scheduler.step(metrics)


@HOOKS.register_module()
@dataclasses.dataclass(eq=False, repr=False)
class WarmupParamHook(Hook):
    """Linear warm-up of a step input: the model loss reads `hyperparams[param_name]`, f32[].

    In iteration i, counted from 0, it is `value * min(1, i / (warmup_epochs * iterations per
    epoch))`. A new value does not cause a new trace.

    Args:
      param_name: name of the hyperparameter; the optimizer must not have one with this name.
      value: the value after the warm-up.
      warmup_epochs: warm-up length in epochs, fractions included.

    Examples:
      >>> hook = WarmupParamHook("mixup", value=0.2, warmup_epochs=5)
    """

    runs_ahead = True

    param_name: str
    value: Finite
    warmup_epochs: Positive

    def before_train(self, runner: RunnerProtocol) -> None:
        """Add the hyperparameter before the step is traced."""
        if self.param_name in ("lr", *runner.optim_wrapper.hyperparams):
            raise ConfigError(
                f"WarmupParamHook: param_name must not be a hyperparameter of the optimizer, "
                f"got {self.param_name!r}; use a scheduler"
            )
        self._set_value(runner)  # a name that comes later would compile the step again

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None
    ) -> None:
        """Set the value of the iteration."""
        self._set_value(runner)

    def _set_value(self, runner: RunnerProtocol) -> None:
        warmup_iters = self.warmup_epochs * self.require_epoch_length(runner)
        runner.hyperparams[self.param_name] = self.value * min(1.0, runner.iter / warmup_iters)


def _list_schedulers(runner: RunnerProtocol) -> Sequence[Any]:
    """Return the schedulers of all optimizers."""
    schedulers = runner.param_schedulers
    if schedulers is not None and not isinstance(schedulers, list | dict):
        raise TypeError(
            f"runner.param_schedulers must be a list, or a dict of lists for several optimizers, "
            f"got {type(schedulers).__name__}"
        )
    return flatten_schedulers(schedulers)
