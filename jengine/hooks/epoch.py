"""The epoch as an input of the training data."""

from typing import Any

from jengine.config.registry import HOOKS
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """The epoch as an input of the training data, which are shuffled by seed and epoch.

    The hook calls the first of `loader.set_epoch`, `loader.sampler.set_epoch` and
    `loader.batch_sampler.sampler.set_epoch` that exists.
    """

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Pass the epoch to the data, unless an epoch may begin within a pass, which must go on
        as it is.
        """
        if runner.train_loop.repeats_data:
            return
        # in a custom loop, perhaps the loader of another library
        loader: Any = runner.train_loop.dataloader
        nested_sampler = getattr(getattr(loader, "batch_sampler", None), "sampler", None)
        # Where PyTorch's loaders may have it, in MMEngine's order
        owners: list[Any] = [loader, getattr(loader, "sampler", None), nested_sampler]
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(runner.epoch)
                return
