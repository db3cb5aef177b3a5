"""Tells the model which epoch it is."""

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class SetEpochInfoHook(Hook):
    """Hands the number of the epoch to the step: the model's loss reads `hyperparams['epoch']`, f32[], from 0 on.

    A traced number: the next epoch is not a new trace. In a loop that counts iterations it stays 0.
    """

    def before_train(self, runner: Runner) -> None:
        """Makes the number known before the step is traced."""
        runner.hyperparams["epoch"] = runner.epoch

    def before_train_epoch(self, runner: Runner) -> None:
        """Sets it."""
        runner.hyperparams["epoch"] = runner.epoch
