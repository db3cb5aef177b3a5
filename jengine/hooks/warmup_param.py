"""Increase a hyperparameter of the loss from 0 to its value over the first epochs."""

from typing import Any

from jengine.errors import ConfigError
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


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

    def __init__(self, param_name: str, value: float, warmup_epochs: float) -> None:
        if not warmup_epochs > 0:
            raise ConfigError(
                f"WarmupParamHook: warmup_epochs must be a positive number of epochs, got {warmup_epochs!r}"
            )
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
