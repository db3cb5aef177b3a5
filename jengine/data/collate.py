"""From samples to batches: convert and stack them, and pad a short batch."""

import datetime
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config import paths
from jengine.config.registry import FUNCTIONS
from jengine.data.host_entries import Batch, Sample

_TEXT = (str, bytes, datetime.date, datetime.timedelta, np.datetime64, np.timedelta64)


@FUNCTIONS.register_module(["default_collate", "pseudo_collate"])
def default_collate(samples: Sequence[Sample]) -> Batch:
    """Stack samples along a new leading axis; MMEngine's `pseudo_collate` is the same here.

    >>> default_collate([{"x": 0.5, "y": 0}, {"x": 1.5, "y": 1}])
    {'x': array([0.5, 1.5]), 'y': array([0, 1])}

    Args:
      samples: pytrees with equal structure and shapes: arrays, numbers, CPU tensors. A list of
        numbers in a dict or tuple is an array.

    Raises:
      ValueError: of JAX or NumPy, the samples differ in structure or shape.
    """
    return jax.tree.map(_stack, *samples, is_leaf=is_numbers_in(samples[0]))


def _stack(*leaves: Any) -> np.ndarray:
    # `np.stack` makes an array of each number first
    return np.array(leaves) if isinstance(leaves[0], np.generic | int | float) else np.stack(leaves)


def is_numbers(node: object) -> bool:
    """Return whether a node is a list of numbers, or of such lists: an array in plain Python."""
    if type(node) is not list or not node:
        return False
    return all(
        isinstance(item, int | float | np.number | np.bool_) or is_numbers(item) for item in node
    )


def is_numbers_in(root: object) -> Callable[[object], bool]:
    """Return `is_numbers` for the nodes below `root`, which may be a list such as [x, y]."""
    return lambda node: node is not root and is_numbers(node)


def stack_batches(batches: Sequence[Batch]) -> Batch:
    """Stack batches with equal structure and shapes along a new leading axis: real[K, B, ...]."""

    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array):
            return jnp.stack(leaves)
        first = np.asarray(leaves[0])
        # `np.stack` takes five times as long for many small arrays
        return (
            np.concatenate(leaves).reshape(len(leaves), *first.shape)
            if first.ndim
            else np.stack(leaves)
        )

    return jax.tree.map(stack, *batches)


def is_flat(batch: Batch) -> bool:
    """Return whether a batch is a plain dict of NumPy arrays, which needs no traversal as a
    pytree.
    """
    return type(batch) is dict and set(map(type, batch.values())) <= {np.ndarray}


def to_numpy(batch: Batch) -> Batch:
    """Return a foreign batch or example with NumPy arrays, also for lists of numbers, strings or
    dates.

    Raises:
      ValueError: a list of lists with different lengths.
    """
    if is_flat(batch):
        return batch
    return jax.tree.map(
        _to_array, batch, is_leaf=lambda x: _is_text(x) or (x is not batch and is_numbers(x))
    )


def _to_array(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array | str | bytes):
        return leaf
    if hasattr(leaf, "detach"):  # a torch tensor, recognized without importing torch
        leaf = leaf.detach().cpu()  # without the gradient, which NumPy refuses
    return np.asarray(leaf)


def _is_text(node: Any) -> bool:
    """Return whether a node is a list of strings or dates, such as file names."""
    # A NamedTuple is a container.
    return (
        type(node) in (list, tuple) and bool(node) and all(isinstance(item, _TEXT) for item in node)
    )


def count_examples(batch: Batch) -> int:
    """Return the number of examples in a batch, which all leaves must have as leading axis.

    ValueError otherwise.
    """
    # A flat dict, the usual batch, is read without JAX's registry: this runs for each batch.
    leaves = list(batch.values()) if is_flat(batch) else jax.tree.leaves(batch)
    sizes = {leaf.shape[:1] if type(leaf) is np.ndarray else np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        shapes = {path: np.shape(leaf) for path, leaf in paths.flatten(batch).items()} or "no array"
        raise ValueError(
            f"the arrays of a batch or a dataset must share their leading axis, got {shapes}; "
            "with batch_axis=None a dataloader passes on batches of any form"
        )
    return sizes.pop()[0]


def pad_examples(batch: Batch, size: int) -> Batch:
    """Repeat the last example until the batch has `size` examples."""
    missing = size - count_examples(batch)
    return jax.tree.map(
        lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)]), batch
    )
