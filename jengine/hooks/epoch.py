"""Pass the epoch to the model and to the sampler."""

from collections.abc import Callable
from typing import Any

from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class SetEpochInfoHook(Hook):
    """Pass the epoch to the step: the model's loss reads `hyperparams['epoch']`, f32[], counted from 0.

    It is an input of the step, so a new epoch does not cause a new trace. In an iteration loop it stays 0.
    """

    def before_train(self, runner: Runner) -> None:
        """Set the epoch before the step is traced."""
        runner.hyperparams["epoch"] = runner.epoch

    def before_train_epoch(self, runner: Runner) -> None:
        """Set the epoch."""
        runner.hyperparams["epoch"] = runner.epoch


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Pass the epoch to the training data, whose order is a function of the seed and the epoch.

    The epoch goes to the first of `loader.set_epoch`, `loader.sampler.set_epoch` and
    `loader.batch_sampler.sampler.set_epoch` that exists.
    """

    priority = "NORMAL"

    def before_train_epoch(self, runner: Runner) -> None:
        """Pass the epoch to the data."""
        set_epoch = _find_set_epoch(runner.train_loop.dataloader)
        if set_epoch is not None:
            set_epoch(runner.epoch)


def _find_set_epoch(loader: Any) -> Callable[[int], Any] | None:
    """Return the method of a loader that takes the epoch; a custom loop may hold the loader of another library."""
    sampler = getattr(loader, "sampler", None)
    nested_sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
    owners: list[Any] = [loader, sampler, nested_sampler]
    return next((owner.set_epoch for owner in owners if hasattr(owner, "set_epoch")), None)
