"""Compute losses from a model's outputs, one number per example, and switch between losses in one compiled step."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.model.adapters import build_loss, call_loss
from jengine.model.model import Losses, PyTree
from jengine.registry import MODELS


@MODELS.register_module()
class CrossEntropy:
    """Softmax cross-entropy with integer labels.

    Args:
      label: the batch entry with the class ids, int[B].
      label_smoothing: share of the probability that is spread over all classes, in [0, 1).
      name: the name of the loss in the log.

    Raises:
      ValueError: `label_smoothing` outside [0, 1).
    """

    def __init__(self, label: str = "label", label_smoothing: float = 0.0, name: str = "loss") -> None:
        if not 0.0 <= label_smoothing < 1.0:
            raise ValueError(f"CrossEntropy: label_smoothing lies in [0, 1), found {label_smoothing}")
        self.label = label
        self.label_smoothing = label_smoothing
        self.name = name

    def __call__(self, logits: jax.Array, batch: dict[str, Any]) -> dict[str, jax.Array]:
        """The losses f32[B] of `logits` f[B, C]."""
        targets = jax.nn.one_hot(batch[self.label], logits.shape[-1], dtype=jnp.float32)
        targets = optax.smooth_labels(targets, self.label_smoothing)
        return {self.name: optax.softmax_cross_entropy(logits.astype(jnp.float32), targets)}


@MODELS.register_module()
class MeanSquaredError:
    """Squared error, averaged over all axes but the first.

    Args:
      target: the batch entry with the targets, of the outputs' shape.
      name: the name of the loss in the log.
    """

    def __init__(self, target: str = "target", name: str = "loss") -> None:
        self.target = target
        self.name = name

    def __call__(self, outputs: jax.Array, batch: dict[str, Any]) -> dict[str, jax.Array]:
        """The losses f32[B] of `outputs` f[B, ...]."""
        error = jnp.square(outputs.astype(jnp.float32) - batch[self.target])
        return {self.name: error.reshape(error.shape[0], -1).mean(axis=1)}


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
