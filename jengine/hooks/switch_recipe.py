"""Switch the training recipe, or the data pipeline alone, at given epochs."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.annotations import Index
from jengine.data import Pipeline
from jengine.data.batch_augments import BatchAugment, build_batch_augment, unchanged
from jengine.errors import ConfigError, closest, config_path
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS
from jengine.train import StepContext

_KEYS = ("action_epoch", "train_pipeline", "batch_augments", "loss", "hyperparams")
_AUGMENT = "augment_index"  # the number of the host that says which augmentation is in force; 0 for none


@HOOKS.register_module()
class SwitchRecipeHook(Hook):
    """Changes data, augmentations, losses and numbers at the beginning of some epochs; nothing is traced anew.

    `train_pipeline` is the `Pipeline` of the training dataset from then on, on the host. The rest is compiled into the
    step once, and chosen there by numbers of the host. `batch_augments` are functions `(batch, rng) -> batch` of what
    is on the device; see `build_batch_augment`. `loss=1` chooses the second of the losses that a `SwitchedLoss` was
    made of. `hyperparams=dict(mixup=0.0)` is what the model's loss reads as `hyperparams['mixup']`.

    A resumed run is where it was: whatever was to act before is done again, in order.

    Args:
      schedule: one dict for each change: `action_epoch` (counted from 1: it holds in that epoch), and one or more of
        `train_pipeline`, `batch_augments` (None for none from then on), `loss` and `hyperparams`. Each of the
        hyperparams needs a value from epoch 1 on; the loss is the first until something is said, and there are no
        augmentations.

    Raises:
      ConfigError: another form; two changes in one epoch; a number without a first value; from the hook, a dataset
        without a pipeline, a training loop that counts iterations, an augmentation that changes shapes.
    """

    def __init__(self, schedule: Sequence[Mapping[str, Any]]) -> None:
        self._augments: list[BatchAugment] = []
        items = []
        for i, item in enumerate(schedule):
            with config_path("schedule", i):
                items.append(self._read(item))
        self.schedule = sorted(items, key=lambda item: item["action_epoch"])
        epochs = [item["action_epoch"] for item in self.schedule]
        for epoch in epochs:
            if epochs.count(epoch) > 1:
                raise ConfigError(f"SwitchRecipeHook: two changes have the action_epoch {epoch}")
        first = {name for item in self.schedule if item["action_epoch"] == 1 for name in item.get("hyperparams", ())}
        for item in self.schedule:
            for name in item.get("hyperparams", ()):
                if name not in first:
                    raise ConfigError(
                        f"SwitchRecipeHook: {name!r} changes in epoch {item['action_epoch']} and has no value before: "
                        f"give one in a change with action_epoch=1{closest(name, first)}"
                    )

    def _read(self, item: Mapping[str, Any]) -> dict[str, Any]:
        """A change with everything in it built: of the augmentation, its number is left."""
        for name in item:
            if name not in _KEYS:
                raise ConfigError(f"SwitchRecipeHook: a change has no entry {name!r}{closest(name, _KEYS)}")
        epoch = item.get("action_epoch")
        if isinstance(epoch, bool) or not isinstance(epoch, int) or epoch < 1:
            raise ConfigError(f"SwitchRecipeHook: action_epoch is an integer of at least 1, found {epoch!r}")
        read = dict(item.items())
        if "train_pipeline" in read:
            with config_path("train_pipeline"):
                read["train_pipeline"] = Pipeline(read["train_pipeline"])
        if read.get("batch_augments") is not None:
            with config_path("batch_augments"):
                self._augments.append(build_batch_augment(read["batch_augments"]))
            read["batch_augments"] = len(self._augments)
        return read

    def before_train(self, runner: Runner) -> None:
        """Puts the recipe of the current epoch in force, after a restart as well."""
        if not runner.train_loop.by_epoch and self.schedule[-1]["action_epoch"] > 1:
            raise ConfigError("SwitchRecipeHook acts when epochs begin, and the training loop counts iterations")
        if any("loss" in item for item in self.schedule):
            runner.hyperparams["loss_index"] = 0
        if self._augments:
            runner.hyperparams[_AUGMENT] = 0
        for item in self.schedule:
            if item["action_epoch"] <= runner.epoch + 1:
                self._apply(runner, item)

    def before_train_epoch(self, runner: Runner) -> None:
        """Changes the recipe if it is time."""
        for item in self.schedule:
            if 1 < item["action_epoch"] == runner.epoch + 1:
                self._apply(runner, item)
                changed = ", ".join(name for name in item if name != "action_epoch")
                runner.logger.info(f"SwitchRecipeHook: from epoch {item['action_epoch']} on another {changed}")

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Augments the batch as the host's number says."""
        if not self._augments:
            return ctx
        for augment in self._augments:
            augment.check(ctx.batch, ctx.rng)
        index = jnp.asarray(ctx.hyperparams[_AUGMENT]).astype(jnp.int32)
        return ctx.replace(batch=jax.lax.switch(index, [unchanged, *self._augments], ctx.batch, ctx.rng))

    def _apply(self, runner: Runner, item: Mapping[str, Any]) -> None:
        if "train_pipeline" in item:
            set_pipeline(runner.train_loop.dataloader, item["train_pipeline"])
        if "batch_augments" in item and self._augments:
            runner.hyperparams[_AUGMENT] = item["batch_augments"] or 0
        if "loss" in item:
            runner.hyperparams["loss_index"] = item["loss"]
        for name, value in item.get("hyperparams", {}).items():
            runner.hyperparams[name] = value


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

    def __init__(self, switch_epoch: Index, switch_pipeline: Any) -> None:
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
