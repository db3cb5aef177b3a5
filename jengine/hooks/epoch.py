"""Pass the epoch to the model and to the sampler."""

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


@HOOKS.register_module()
class DistSamplerSeedHook(Hook):
    """Tells the training data which epoch begins; its order is a function of the seed and the epoch.

    The epoch goes to `loader.set_epoch`, `loader.sampler.set_epoch` or `loader.batch_sampler.sampler.set_epoch`,
    whichever is there first; to nobody where there is none.
    """

    priority = "NORMAL"

    def before_train_epoch(self, runner: Runner) -> None:
        """Hands the epoch to the data."""
        loader = runner.train_loop.dataloader
        batch_sampler = getattr(loader, "batch_sampler", None)
        for owner in (loader, getattr(loader, "sampler", None), getattr(batch_sampler, "sampler", None)):
            if (set_epoch := getattr(owner, "set_epoch", None)) is not None:
                set_epoch(runner.epoch)
                return
