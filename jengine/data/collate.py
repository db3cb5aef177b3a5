"""Collate samples into batches: stack them, and pad a short batch."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine import paths


def default_collate(samples: Sequence[Any]) -> Any:
    """Stack samples along a new leading axis.

    Args:
      samples: pytrees of equal structure whose leaves have equal shapes: arrays, numbers, CPU tensors.

    Returns:
      One pytree of numpy arrays with leading axis `len(samples)`.

    Raises:
      ValueError: the samples differ in structure or shape; the message names the leaf.
    """
    try:
        return jax.tree.map(_stack, *samples)
    except ValueError as error:
        raise ValueError(_describe_difference(samples)) from error


def _stack(*leaves: Any) -> np.ndarray:
    # `np.stack` makes an array of each number first
    return np.array(leaves) if isinstance(leaves[0], np.generic | int | float) else np.stack(leaves)


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack batches of equal structure and shapes along a new leading axis: real[K, B, ...]."""

    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array):
            return jnp.stack(leaves)
        first = np.asarray(leaves[0])
        # `np.stack` takes five times as long for many small arrays
        return np.concatenate(leaves).reshape(len(leaves), *first.shape) if first.ndim else np.stack(leaves)

    return jax.tree.map(stack, *batches)


def is_flat(batch: Any) -> bool:
    """Return whether a batch is a plain dict of NumPy arrays, which needs no traversal as a pytree."""
    return type(batch) is dict and set(map(type, batch.values())) <= {np.ndarray}


def count_examples(batch: Any) -> int:
    """Return the number of examples of a batch, the length of the leading axis of all leaves.

    Raises:
      ValueError: no array, a leaf without a leading axis, or two leaves that differ in it.
    """
    leaves = list(batch.values()) if is_flat(batch) else jax.tree.leaves(batch)
    sizes = {leaf.shape[:1] if type(leaf) is np.ndarray else np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        shapes = {path: np.shape(leaf) for path, leaf in paths.flatten(batch).items()} or "no array"
        raise ValueError(f"the arrays of a batch or a dataset must share their leading axis, got {shapes}")
    return sizes.pop()[0]


def pad_examples(batch: Any, size: int) -> Any:
    """Repeat the last example until the batch has `size` examples."""
    missing = size - count_examples(batch)
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)]), batch)


def _describe_difference(samples: Sequence[Any]) -> str:
    """Return why the samples cannot be stacked."""
    first = paths.flatten(samples[0])
    structure: Any = jax.tree.structure(samples[0])
    for index, sample in enumerate(samples):
        if jax.tree.structure(sample) != structure:
            return f"samples of a batch must have the same structure, got {structure} and {jax.tree.structure(sample)}"
        for path, leaf in paths.flatten(sample).items():
            if np.shape(leaf) != np.shape(first[path]):
                return (
                    f"samples of a batch must have the same shapes, got {path!r} of {np.shape(first[path])} in sample "
                    f"0 and of {np.shape(leaf)} in sample {index}; pad or crop it, or pass a collate_fn"
                )
    return "the samples of a batch cannot be stacked"
