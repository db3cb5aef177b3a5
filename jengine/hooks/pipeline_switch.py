"""Reads the training data through another pipeline from some epoch on."""

from typing import Any

from jengine.data import Pipeline
from jengine.errors import ConfigError, config_path
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS


@HOOKS.register_module()
class PipelineSwitchHook(Hook):
    """Gives the training dataset another `Pipeline`, once; a run resumed afterwards has it from the start.

    Args:
      switch_epoch: the first epoch with it, counted from 0.
      switch_pipeline: the transforms; see `jengine.data.Pipeline`.

    Raises:
      ConfigError: a negative epoch; from the hook, a dataset without a pipeline, or a training loop that counts
        iterations.
    """

    def __init__(self, switch_epoch: int, switch_pipeline: Any) -> None:
        if isinstance(switch_epoch, bool) or not isinstance(switch_epoch, int) or switch_epoch < 0:
            raise ConfigError(f"PipelineSwitchHook: switch_epoch is an integer of at least 0, found {switch_epoch!r}")
        self.switch_epoch = switch_epoch
        with config_path("switch_pipeline"):
            self.switch_pipeline = Pipeline(switch_pipeline)
        self._switched = False

    def before_train(self, runner: Runner) -> None:
        """Checks that epochs are counted."""
        if not runner.train_loop.by_epoch:
            raise ConfigError("PipelineSwitchHook acts when an epoch begins, and the training loop counts iterations")

    def before_train_epoch(self, runner: Runner) -> None:
        """Switches if it is time."""
        if runner.epoch >= self.switch_epoch and not self._switched:
            set_pipeline(runner.train_loop.dataloader, self.switch_pipeline)
            self._switched = True
            runner.logger.info(f"PipelineSwitchHook: from epoch {runner.epoch} on, counted from 0, another pipeline")


def set_pipeline(loader: Any, pipeline: Pipeline) -> None:
    """Gives a pipeline to the outermost dataset of a loader that has one, and ends what reads ahead by the old one.

    Raises:
      ConfigError: no dataset has one.
    """
    owner = loader.dataset
    while not hasattr(owner, "pipeline"):
        if not hasattr(owner, "dataset"):
            raise ConfigError(
                f"another pipeline is for a dataset that has a `pipeline`, found {type(loader.dataset).__name__}: wrap "
                "it in one, dict(type='TransformedDataset', dataset=..., pipeline=[...])"
            )
        owner = owner.dataset
    owner.pipeline = pipeline
    if hasattr(loader, "close"):
        loader.close()
