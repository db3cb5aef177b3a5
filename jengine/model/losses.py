"""Losses with one value per example, and a switch between losses that does not recompile."""

import abc
import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.config.annotations import Decay
from jengine.config.registry import MODELS
from jengine.data.masking import get_mask
from jengine.model.autocast import at_least_float32
from jengine.model.labels import require_class_indices
from jengine.model.model import ArrayTree, Batch, Losses
from jengine.model.selection import Selector, describe_array, select_array


class LazyLogits(abc.ABC):
    """Logits f[..., V] that are not computed yet, such as those of many tokens at once."""

    @property
    @abc.abstractmethod
    def shape(self) -> tuple[int, ...]:
        """The shape of all logits."""

    @abc.abstractmethod
    def map_tokens(self, fn: Callable[..., jax.Array], *arrays: jax.Array) -> jax.Array:
        """Return `fn(logits, *arrays)`, a number for each token."""


@MODELS.register_module()
@dataclasses.dataclass(eq=False)
class CrossEntropy:
    """Softmax cross-entropy with integer labels, or with soft labels: a probability for each class.

    Logits may be `LazyLogits` too, which are computed for a chunk of tokens at a time.

    A label outside [0, C) that is not `ignore_index` has the loss NaN, which ends a run with a
    message about the label.

    >>> CrossEntropy()(jnp.zeros((2, 4)), {"label": jnp.array([0, 3])})
    {'loss': Array([1.3862944, 1.3862944], dtype=float32)}

    Args:
      label: name, index or dotted path of the batch entry with the class indices, int[B, ...], or
        with probabilities of the C classes, f[B, ..., C].
      label_smoothing: fraction of the probability that is distributed over all classes, in [0, 1).
      name: the loss name in the log.
      output: the model output with the logits; None if the outputs are the logits.
      ignore_index: label for examples (or pixels) that do not count: loss and weight are zero. None
        for no such label; -100 is PyTorch's default, 255 is usual for segmentation.

    Raises:
      ValueError: `label_smoothing` is outside [0, 1).
    """

    label: Selector = "label"
    label_smoothing: Decay = 0.0
    name: str = "loss"
    output: Selector | None = None
    ignore_index: int | None = None

    def __call__(self, outputs: ArrayTree, batch: Batch) -> Losses:
        """Return the losses for logits f[B, ..., C]: f32[B, ...].

        With `ignore_index` it is the pair (sum, weight) over the labels that count, f32[] each.

        Raises:
          KeyError: the outputs or the batch do not have the entry.
          ValueError: the shape of integer labels is not the logits' without the last axis, that of
            soft labels is not the logits', or soft labels with `ignore_index`.
        """
        logits: Any = outputs
        if not isinstance(outputs, LazyLogits):
            logits = select_array(outputs, self.output, "CrossEntropy.output", "outputs")
        labels = select_array(batch, self.label, "CrossEntropy.label", "batch")
        is_soft = jnp.issubdtype(labels.dtype, jnp.floating) and labels.shape == logits.shape
        if is_soft and self.ignore_index is None:
            return {self.name: self._map(logits, labels)}
        if not jnp.issubdtype(labels.dtype, jnp.integer) or labels.shape != logits.shape[:-1]:
            soft = "as ignore_index needs" if is_soft else "or probabilities of their shape"
            raise ValueError(
                "`CrossEntropy.label` must be class indices, integers of the shape of the logits "
                f"{describe_array(logits)} without the last axis, {soft}, got {self.label!r}, "
                f"{describe_array(labels)}"
            )
        num_classes = logits.shape[-1]
        require_class_indices(labels, num_classes, "CrossEntropy.label", self.ignore_index)
        labels = jnp.asarray(labels).astype(jnp.int32)
        losses = self._map(logits, labels)
        # `one_hot` would give zeros
        losses = jnp.where((labels >= 0) & (labels < num_classes), losses, jnp.nan)
        if self.ignore_index is None:  # the step averages over the real examples
            return {self.name: losses}
        is_counted = labels != self.ignore_index
        if (mask := get_mask(batch)) is not None:
            is_counted &= mask.reshape(-1, *(1,) * (labels.ndim - 1))
        return {
            self.name: (jnp.where(is_counted, losses, 0.0).sum(), is_counted.sum(dtype=jnp.float32))
        }

    def _map(self, logits: Any, labels: jax.Array) -> jax.Array:
        if isinstance(logits, LazyLogits):
            return logits.map_tokens(self._compare, labels)
        return self._compare(logits, labels)

    def _compare(self, logits: jax.Array, labels: jax.Array) -> jax.Array:
        """Return the losses f32[...] for logits f[..., C] and class indices or probabilities."""
        # Optax's loss for integer labels cannot smooth them.
        is_index = labels.ndim < logits.ndim
        targets = jax.nn.one_hot(labels, logits.shape[-1]) if is_index else labels
        targets = optax.smooth_labels(targets.astype(jnp.float32), self.label_smoothing)
        return optax.softmax_cross_entropy(at_least_float32(logits), targets)


@MODELS.register_module()
@dataclasses.dataclass(eq=False)
class MeanSquaredError:
    """Squared error, averaged over all axes but the first.

    >>> MeanSquaredError()(jnp.ones((2, 3)), {"target": jnp.zeros((2, 3))})
    {'loss': Array([1., 1.], dtype=float32)}

    Args:
      target: name, index or dotted path of the batch entry with the targets, shaped like the
        outputs.
      name: the loss name in the log.
      output: the model output; None if the outputs are an array.
    """

    target: Selector = "target"
    name: str = "loss"
    output: Selector | None = None

    def __call__(self, outputs: ArrayTree, batch: Batch) -> Losses:
        """Return the losses f32[B] for `outputs` f[B, ...].

        ValueError if the targets have another shape.
        """
        outputs = select_array(outputs, self.output, "MeanSquaredError.output", "outputs")
        targets = select_array(batch, self.target, "MeanSquaredError.target", "batch")
        # Otherwise outputs [B, 1] and targets [B] would broadcast to [B, B], silently.
        if targets.shape != outputs.shape:
            raise ValueError(
                "`MeanSquaredError.target` must have the shape of the outputs "
                f"{describe_array(outputs)}, got {self.target!r}, {describe_array(targets)}"
            )
        error = jnp.square(at_least_float32(outputs) - targets)
        return {self.name: error.reshape(error.shape[0], -1).mean(axis=1)}
