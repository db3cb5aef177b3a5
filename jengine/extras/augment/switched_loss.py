"""A loss that is one of several, chosen while a run trains."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.config.registry import MODELS
from jengine.model.adapters import build_loss, call_loss
from jengine.model.model import ArrayTree, Batch, Losses


@MODELS.register_module()
class SwitchedLoss:
    """Loss with the index `hyperparams['loss_index']`, which can change without recompiling.

    Args:
      losses: two or more loss functions or configs, which return the same names and shapes.
    """

    def __init__(self, losses: Sequence[Callable[..., Any] | Mapping[str, Any]]) -> None:
        if len(losses) < 2:
            raise ValueError(
                f"SwitchedLoss: `losses` must be two or more losses, got {len(losses)}"
            )
        self._losses = [build_loss(loss) for loss in losses]

    def __call__(self, outputs: ArrayTree, batch: Batch, hyperparams: Mapping[str, Any]) -> Losses:
        """Return the selected loss; KeyError if `hyperparams` does not have `loss_index`."""
        if "loss_index" not in hyperparams:
            raise KeyError(
                f"SwitchedLoss: `hyperparams` must have 'loss_index', got {sorted(hyperparams)}; "
                "use a SwitchRecipeHook with `loss` to set it"
            )
        # `loss=loss` binds each function now: all closures would share the last one. Only the
        # chosen branch runs.
        branches = [
            lambda loss=loss: call_loss(loss, outputs, batch, hyperparams) for loss in self._losses
        ]
        return jax.lax.switch(jnp.asarray(hyperparams["loss_index"]).astype(jnp.int32), branches)
