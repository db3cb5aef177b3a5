"""Lets the dense loss of DenseCL in after a number of iterations."""

from typing import Any

from jengine.contrib.selfsup.entries import model_attribute
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class DenseCLHook(Hook):
    """Holds `loss_lambda`, the part of the dense loss, at 0 for the first iterations: matches mean nothing before.

    The value for later is the model's attribute `loss_lambda`. The number in force is `hyperparams['loss_lambda']` in
    the model's loss, an input of the compiled step: the switch traces nothing anew.

    Args:
      start_iters: iterations without the dense loss.

    Raises:
      AssertionError: at the beginning of training, if the model has no `loss_lambda`.
    """

    runs_ahead = True

    def __init__(self, start_iters: int = 1000) -> None:
        self.start_iters = start_iters

    def before_train(self, runner: Runner) -> None:
        """Names the number before the step is traced, and holds that the model has a value for it."""
        self._set(runner)

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Sets the number of this iteration."""
        self._set(runner)

    def _set(self, runner: Runner) -> None:
        value = model_attribute(runner.model, "loss_lambda", type(self).__name__)
        runner.hyperparams["loss_lambda"] = value if runner.iter >= self.start_iters else 0.0
