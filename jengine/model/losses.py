"""Compute losses of a model's outputs, one value per example, and switch between losses without recompiling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.annotations import Decay
from jengine.model.adapters import build_loss, call_loss
from jengine.model.model import Losses, PyTree
from jengine.registry import MODELS


@MODELS.register_module()
class CrossEntropy:
    """Compute the softmax cross-entropy with integer labels.

    Args:
      label: the batch entry with the class indices, int[B].
      label_smoothing: fraction of the probability that is distributed over all classes, in [0, 1).
      name: the name of the loss in the log.

    Raises:
      ValueError: if `label_smoothing` is outside [0, 1).
    """

    def __init__(self, label: str = "label", label_smoothing: Decay = 0.0, name: str = "loss") -> None:
        self.label = label
        self.label_smoothing = label_smoothing
        self.name = name

    def __call__(self, logits: jax.Array, batch: dict[str, Any]) -> dict[str, jax.Array]:
        """Return the losses f32[B] of `logits` f[B, C]."""
        targets = jax.nn.one_hot(batch[self.label], logits.shape[-1], dtype=jnp.float32)
        targets = optax.smooth_labels(targets, self.label_smoothing)
        return {self.name: optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)}


@MODELS.register_module()
class MeanSquaredError:
    """Compute the squared error, averaged over all axes but the first.

    Args:
      target: the batch entry with the targets, of the same shape as the outputs.
      name: the name of the loss in the log.
    """

    def __init__(self, target: str = "target", name: str = "loss") -> None:
        self.target = target
        self.name = name

    def __call__(self, outputs: jax.Array, batch: dict[str, Any]) -> dict[str, jax.Array]:
        """Return the losses f32[B] of `outputs` f[B, ...]."""
        error = jnp.square(outputs.astype(jnp.float32) - batch[self.target])
        return {self.name: error.reshape(error.shape[0], -1).mean(axis=1)}


@MODELS.register_module()
class SwitchedLoss:
    """Compute the loss with the index `hyperparams['loss_index']`, which can change without recompiling.

    Args:
      losses: two or more loss functions or configs, which return entries of the same names and shapes.

    Raises:
      ValueError: if there are fewer than two losses.
    """

    def __init__(self, losses: Sequence[Callable[..., Any] | Mapping[str, Any]]) -> None:
        if len(losses) < 2:
            raise ValueError(f"SwitchedLoss: `losses` must be two or more losses, got {len(losses)}")
        self._losses = [build_loss(loss) for loss in losses]

    def __call__(self, outputs: PyTree, batch: PyTree, hyperparams: Mapping[str, Any]) -> Losses:
        """Return the selected loss.

        Raises:
          KeyError: if `hyperparams` does not have `loss_index`.
        """
        if "loss_index" not in hyperparams:
            raise KeyError(
                f"SwitchedLoss: `hyperparams` must have 'loss_index', got {sorted(hyperparams)}; "
                "use a SwitchRecipeHook with `loss` to set it"
            )
        branches = [lambda loss=loss: call_loss(loss, outputs, batch, hyperparams) for loss in self._losses]
        return jax.lax.switch(jnp.asarray(hyperparams["loss_index"]).astype(jnp.int32), branches)
