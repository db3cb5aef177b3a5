"""Several losses in one compiled step, of which one is computed."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jengine.model.adapting import build_loss, call_loss
from jengine.model.model import Losses, PyTree
from jengine.registry import MODELS


@MODELS.register_module()
class SwitchedLoss:
    """The loss that `hyperparams['loss_index']` chooses, a number of the host: another one is no new trace.

    Args:
      losses: two or more losses, functions or configs; all return entries of the same names and shapes.

    Raises:
      ValueError: fewer than two losses.
    """

    def __init__(self, losses: Sequence[Callable[..., Any] | Mapping[str, Any]]) -> None:
        if len(losses) < 2:
            raise ValueError(f"SwitchedLoss chooses among two losses or more, found {len(losses)}")
        self._losses = [build_loss(loss) for loss in losses]

    def __call__(self, outputs: PyTree, batch: PyTree, hyperparams: Mapping[str, Any]) -> Losses:
        """Computes the chosen loss.

        Raises:
          KeyError: nobody sets `loss_index`.
        """
        if "loss_index" not in hyperparams:
            raise KeyError(
                "SwitchedLoss reads hyperparams['loss_index'], which nobody sets: a SwitchRecipeHook with `loss` does; "
                f"found {sorted(hyperparams)}"
            )
        branches = [lambda loss=loss: call_loss(loss, outputs, batch, hyperparams) for loss in self._losses]
        return jax.lax.switch(jnp.asarray(hyperparams["loss_index"]).astype(jnp.int32), branches)
