"""Switches of the training recipe, or the data pipeline alone, at given epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.config.annotations import Count, Index, check_values
from jengine.config.errors import ConfigError, closest, config_path
from jengine.config.registry import HOOKS
from jengine.data.pipeline import Pipeline
from jengine.extras.augment.batch_augments import BatchAugment, build_batch_augment, identity
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.train.traced_hooks import StepContext

_KEYS = ("action_epoch", "train_pipeline", "batch_augments", "loss", "hyperparams")
_AUGMENT_KEY = "augment_index"  # the hyperparameter that selects the augmentation; 0 for none


@HOOKS.register_module()
class SwitchRecipeHook(Hook):
    """Schedule of data, augmentations, losses and hyperparameters by epoch, without a new trace.

    `train_pipeline` becomes the `Pipeline` of the training dataset, on the host. Everything else is
    compiled into the step once and selected there by hyperparameters. `batch_augments` are
    functions `(batch, rng) -> batch` on the device; see `build_batch_augment`. `loss=1` selects the
    second loss in a `SwitchedLoss`. `hyperparams=dict(mixup=0.0)` sets the value that the model
    loss reads as `hyperparams['mixup']`.

    A resumed run first applies all earlier changes again, in order.

    Args:
      schedule: one dict for each change: `action_epoch`, the first epoch with the change, counted
        from 1, and one or more of `train_pipeline`, `batch_augments` (None for none from then on),
        `loss` and `hyperparams`. Every hyperparameter needs a value from epoch 1 on. The run starts
        with the first loss and without augmentations.

    Raises:
      ConfigError: an invalid change; two changes in one epoch; a hyperparameter without a first
        value; from the hook, a dataset without a pipeline, a training loop that counts iterations,
        an augmentation that changes shapes.

    Examples:
      >>> first, last = (
      ...     dict(action_epoch=1, hyperparams={"mixup": 1}),
      ...     dict(action_epoch=90, hyperparams={"mixup": 0}),
      ... )
      >>> hook = SwitchRecipeHook(schedule=[first, last])
    """

    def __init__(self, schedule: Sequence[Mapping[str, Any]]) -> None:
        self._augments: list[BatchAugment] = []
        items = []
        for i, item in enumerate(schedule):
            with config_path("schedule", i):
                items.append(self._build_item(item))
        self.schedule = sorted(items, key=lambda item: item["action_epoch"])
        epochs = [item["action_epoch"] for item in self.schedule]
        if twice := [epoch for epoch in epochs if epochs.count(epoch) > 1]:
            raise ConfigError(
                f"SwitchRecipeHook: each action_epoch must occur once, got {twice[0]} twice or more"
            )
        # Hyperparameters are inputs of the compiled step: all names must exist at the first call,
        # or a change would compile again.
        first = {
            name
            for item in self.schedule
            if item["action_epoch"] == 1
            for name in item.get("hyperparams", ())
        }
        for item in self.schedule:
            for name in item.get("hyperparams", ()):
                if name not in first:
                    raise ConfigError(
                        "SwitchRecipeHook: hyperparams must have a first value in a change with "
                        "action_epoch=1, "
                        f"got {name!r} first in epoch {item['action_epoch']}{closest(name, first)}"
                    )

    def before_train(self, runner: RunnerProtocol) -> None:
        """Apply the recipe for the current epoch, also after a restart."""
        if not runner.train_loop.by_epoch and self.schedule[-1]["action_epoch"] > 1:
            raise ConfigError(
                "SwitchRecipeHook: the training loop must count epochs, got one that counts "
                "iterations"
            )
        if any("loss" in item for item in self.schedule):
            # a name that comes later would compile the step again
            runner.hyperparams["loss_index"] = 0
        if self._augments:
            runner.hyperparams[_AUGMENT_KEY] = 0
        for item in self.schedule:
            if item["action_epoch"] <= runner.epoch + 1:
                self._apply(runner, item)

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Apply the change of this epoch, if there is one."""
        for item in self.schedule:
            # `before_train` has applied those of the first
            if 1 < item["action_epoch"] == runner.epoch + 1:
                self._apply(runner, item)
                changed = ", ".join(name for name in item if name != "action_epoch")
                runner.logger.info(
                    f"SwitchRecipeHook: changed {changed} from epoch {item['action_epoch']} on"
                )

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Apply the augmentation that the hyperparameter selects."""
        if not self._augments:
            return ctx
        for augment in self._augments:
            augment.check(ctx.batch, ctx.rng)  # branches of a switch return equal shapes
        index = jnp.asarray(ctx.hyperparams[_AUGMENT_KEY]).astype(jnp.int32)
        return ctx.replace(
            batch=jax.lax.switch(index, [identity, *self._augments], ctx.batch, ctx.rng)
        )

    def _build_item(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """Build the objects in a change, and replace the augmentation by an index."""
        for name in item:
            if name not in _KEYS:
                raise ConfigError(
                    f"SwitchRecipeHook: a change has no entry {name!r}{closest(name, _KEYS)}"
                )
        built = dict(item.items())
        check_values("", _read_epoch, {"action_epoch": None, **built})
        if "train_pipeline" in built:
            with config_path("train_pipeline"):
                built["train_pipeline"] = Pipeline(built["train_pipeline"])
        if built.get("batch_augments") is not None:
            with config_path("batch_augments"):
                self._augments.append(build_batch_augment(built["batch_augments"]))
            # An index: all augmentations are compiled into one step, which the number selects from;
            # 0 is none.
            built["batch_augments"] = len(self._augments)
        return built

    def _apply(self, runner: RunnerProtocol, item: Mapping[str, Any]) -> None:
        if "train_pipeline" in item:
            set_pipeline(runner.train_loop.dataloader, item["train_pipeline"])
        if "batch_augments" in item and self._augments:
            runner.hyperparams[_AUGMENT_KEY] = item["batch_augments"] or 0
        if "loss" in item:
            runner.hyperparams["loss_index"] = item["loss"]
        runner.hyperparams.update(item.get("hyperparams", {}))


@HOOKS.register_module()
class PipelineSwitchHook(Hook):
    """Switch to another `Pipeline` of the training dataset.

    A run resumed afterwards starts with the new one.

    Args:
      switch_epoch: the first epoch with the new pipeline, counted from 0.
      switch_pipeline: the transforms; see `jengine.data.Pipeline`.
    """

    def __init__(self, switch_epoch: Index, switch_pipeline: Any) -> None:
        self.switch_epoch = switch_epoch
        with config_path("switch_pipeline"):
            self.switch_pipeline = Pipeline(switch_pipeline)
        self._is_switched = False

    def before_train(self, runner: RunnerProtocol) -> None:
        """Check that the training loop counts epochs."""
        if not runner.train_loop.by_epoch:
            raise ConfigError(
                "PipelineSwitchHook: the training loop must count epochs, got one that counts "
                "iterations"
            )

    def before_train_epoch(self, runner: RunnerProtocol) -> None:
        """Switch if it is due."""
        if runner.epoch >= self.switch_epoch and not self._is_switched:
            set_pipeline(runner.train_loop.dataloader, self.switch_pipeline)
            self._is_switched = True
            runner.logger.info(
                f"PipelineSwitchHook: changed the pipeline from epoch {runner.epoch} on, counted "
                "from 0"
            )


def _read_epoch(action_epoch: Count) -> None:
    """Annotate the entry of a change that `SwitchRecipeHook` checks."""


def set_pipeline(loader: Any, pipeline: Pipeline) -> None:
    """Set the pipeline of the outermost dataset with one, and discard batches read ahead with
    the old pipeline.
    """
    owner = loader.dataset
    while not hasattr(owner, "pipeline"):
        if not hasattr(owner, "dataset"):
            raise ConfigError(
                "the dataset must have a `pipeline` to change, got "
                f"{type(loader.dataset).__name__}; "
                "wrap it: dict(type='TransformedDataset', dataset=..., pipeline=[...])"
            )
        owner = owner.dataset
    owner.pipeline = pipeline
    # Workers hold copies of the old pipeline, and start again with the next epoch.
    if hasattr(loader, "close"):
        loader.close()
