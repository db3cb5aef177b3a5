"""Augmentation of training batches inside the compiled step."""

from collections.abc import Sequence
from typing import Any

import jax

from jengine.config.errors import config_path
from jengine.config.registry import HOOKS
from jengine.extras.augment.batch_augments import build_batch_augment
from jengine.hooks.hook import Hook
from jengine.train.traced_hooks import StepContext


@HOOKS.register_module()
class BatchAugmentHook(Hook):
    """Augmentations of each training batch, in order, on the device.

    Unlike those of a `SwitchRecipeHook` they may change shapes and dtypes: class indices become
    soft labels.

    Args:
      augments: one or a list. Each is a function `(batch, rng) -> batch`, the config of one in
        TRANSFORMS, or `dict(augments=[...], probs=[...])`, of which one is drawn for each batch;
        see `build_batch_augment`.

    Raises:
      ConfigError, TypeError: what is no augmentation.

    Examples:
      >>> mix = dict(
      ...     augments=[dict(type="MixUp", alpha=0.8), dict(type="CutMix")], probs=[0.5, 0.5]
      ... )
      >>> hook = BatchAugmentHook([dict(type="SoftLabels", num_classes=10, smoothing=0.1), mix])
    """

    def __init__(self, augments: Any) -> None:
        entries = (
            list(augments)
            if isinstance(augments, Sequence) and not isinstance(augments, str)
            else [augments]
        )
        self._augments = []
        for i, entry in enumerate(entries):
            with config_path("augments", i):
                self._augments.append(build_batch_augment(entry))

    def traced_batch(self, ctx: StepContext) -> StepContext:
        """Augment the batch; each augmentation has a key of its own."""
        batch = ctx.batch
        for i, augment in enumerate(self._augments):
            batch = augment(batch, jax.random.fold_in(ctx.rng, i))
        return ctx.replace(batch=batch)
