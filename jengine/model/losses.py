"""Compute losses of a model's outputs, one value per example, and switch between losses without recompiling."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.annotations import Decay
from jengine.data.masking import get_mask
from jengine.model.adapters import build_loss, call_loss
from jengine.model.autocast import at_least_float32
from jengine.model.labels import require_class_indices
from jengine.model.model import Losses, PyTree
from jengine.registry import MODELS
from jengine.selection import Selector, describe_array, select_array


@MODELS.register_module()
class CrossEntropy:
    """Compute the softmax cross-entropy with integer labels.

    A label outside [0, C) that is not `ignore_index` has the loss NaN. In a run, the labels of the first batches are
    also checked on the host, which raises an error before such a batch is used.

    Args:
      label: the batch entry with the class indices, int[B, ...]: its name, index or dotted path.
      label_smoothing: fraction of the probability that is distributed over all classes, in [0, 1).
      name: the name of the loss in the log.
      output: the entry of the model's outputs with the logits; None if the outputs are the logits.
      ignore_index: the label of examples (or pixels) that do not count: their loss and their weight are zero. None for
        no such label; -100 is PyTorch's default, 255 that of many segmentation data sets.

    Raises:
      ValueError: if `label_smoothing` is outside [0, 1).
    """

    def __init__(
        self,
        label: Selector = "label",
        label_smoothing: Decay = 0.0,
        name: str = "loss",
        output: Selector | None = None,
        ignore_index: int | None = None,
    ) -> None:
        self.label = label
        self.label_smoothing = label_smoothing
        self.name = name
        self.output = output
        self.ignore_index = ignore_index

    def __call__(self, outputs: PyTree, batch: PyTree) -> Losses:
        """Return the losses of logits f[B, ..., C].

        Returns:
          f32[B, ...]; with `ignore_index` the pair (sum, weight) over the labels that count, f32[] each.

        Raises:
          KeyError: if the outputs or the batch do not have the entry.
          ValueError: if the labels are not integers of the shape of the logits without their last axis.
        """
        logits = select_array(outputs, self.output, "CrossEntropy.output", "outputs")
        labels = select_array(batch, self.label, "CrossEntropy.label", "batch")
        if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.shape != logits.shape[:-1]:
            raise ValueError(
                f"`CrossEntropy.label` must be class indices of the shape of the logits {describe_array(logits)} "
                f"without the last axis, got {self.label!r}, {describe_array(labels)}"
            )
        num_classes = logits.shape[-1]
        require_class_indices(labels, num_classes, "CrossEntropy.label", self.ignore_index)
        labels = jnp.asarray(labels).astype(jnp.int32)
        targets = jax.nn.one_hot(labels, num_classes, dtype=jnp.float32)
        targets = optax.smooth_labels(targets, self.label_smoothing)
        losses = optax.softmax_cross_entropy(at_least_float32(logits), targets)
        losses = jnp.where((labels >= 0) & (labels < num_classes), losses, jnp.nan)
        if self.ignore_index is None:
            return {self.name: losses}
        is_counted = labels != self.ignore_index
        if (mask := get_mask(batch)) is not None:
            is_counted &= mask.reshape(-1, *(1,) * (labels.ndim - 1))
        return {self.name: (jnp.where(is_counted, losses, 0.0).sum(), is_counted.sum(dtype=jnp.float32))}


@MODELS.register_module()
class MeanSquaredError:
    """Compute the squared error, averaged over all axes but the first.

    Args:
      target: the batch entry with the targets, of the same shape as the outputs: its name, index or dotted path.
      name: the name of the loss in the log.
      output: the entry of the model's outputs; None if the outputs are an array.
    """

    def __init__(self, target: Selector = "target", name: str = "loss", output: Selector | None = None) -> None:
        self.target = target
        self.name = name
        self.output = output

    def __call__(self, outputs: PyTree, batch: PyTree) -> Losses:
        """Return the losses f32[B] of `outputs` f[B, ...].

        Raises:
          KeyError: if the outputs or the batch do not have the entry.
          ValueError: if the shapes of the targets and outputs differ.
        """
        outputs = select_array(outputs, self.output, "MeanSquaredError.output", "outputs")
        targets = select_array(batch, self.target, "MeanSquaredError.target", "batch")
        if targets.shape != outputs.shape:
            raise ValueError(
                f"`MeanSquaredError.target` must have the shape of the outputs {describe_array(outputs)}, got "
                f"{self.target!r}, {describe_array(targets)}"
            )
        error = jnp.square(at_least_float32(outputs) - targets)
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
