"""Inputs of the step that the loss reads in `hyperparams`: the epoch, or a number that warms up."""

import dataclasses

from jengine.config.annotations import Finite, Positive
from jengine.config.errors import ConfigError
from jengine.config.registry import HOOKS
from jengine.data.batch_check import Batch
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class SetEpochInfoHook(Hook):
    """The epoch as a step input: the model loss reads `hyperparams['epoch']`, f32[], counted from
    0.

    A new epoch does not cause a new trace. In an iteration loop the epoch stays 0.
    """

    def before_train(self, runner: RunnerProtocol) -> None:
        """Set the epoch, for the first time before the step is traced."""
        runner.hyperparams["epoch"] = runner.epoch

    before_train_epoch = before_train


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

    acts_on = "hyperparams"

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
