"""Set hyperparameters ahead of each step: by the parameter schedulers, or by a linear warm-up."""

from collections.abc import Iterator, Mapping
from typing import Any

from jengine.annotations import Finite, Positive
from jengine.errors import ConfigError
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


@HOOKS.register_module()
class WarmupParamHook(Hook):
    """Pass a linearly growing number to the step: the model's loss reads `hyperparams[param_name]`, f32[].

    In iteration i, counted from 0, it is `value * min(1, i / (warmup_epochs * iterations of an epoch))`. It is an input
    of the step: nothing is traced again while it grows.

    Args:
      param_name: name of the number.
      value: the number after the warm-up.
      warmup_epochs: length of the warm-up in epochs, fractions included.

    Raises:
      ConfigError: a warm-up that is not positive; from the hook, a name that the optimizer uses.
    """

    runs_ahead = True

    def __init__(self, param_name: str, value: Finite, warmup_epochs: Positive) -> None:
        self.param_name = param_name
        self.value = value
        self.warmup_epochs = warmup_epochs

    def before_train(self, runner: Runner) -> None:
        """Add the number to the hyperparameters before the step is traced."""
        if self.param_name in ("lr", *runner.optim_wrapper.hyperparams):
            raise ConfigError(
                f"WarmupParamHook: param_name must not be a hyperparameter of the optimizer, "
                f"got {self.param_name!r}; use a scheduler"
            )
        self._set(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Set the number."""
        self._set(runner)

    def _set(self, runner: Runner) -> None:
        length = self.warmup_epochs * len(runner.train_loop.dataloader)
        runner.hyperparams[self.param_name] = self.value * min(1.0, runner.iter / length)
