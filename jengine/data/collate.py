"""Collate samples to batches: stack them, and pad a short batch with rows that a mask marks as not real."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine import paths

MASK = "mask"


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
        return jax.tree.map(lambda *leaves: np.stack(leaves), *samples)
    except ValueError as error:
        raise ValueError(_difference(samples)) from error


def stack_batches(batches: Sequence[Any]) -> Any:
    """Stack batches of equal structure and shapes along a new leading axis: real[K, B, ...]."""

    def stack(*leaves: Any) -> Any:
        if isinstance(leaves[0], jax.Array):
            return jnp.stack(leaves)
        first = np.asarray(leaves[0])
        # `np.stack` takes five times as long for many small arrays
        return np.concatenate(leaves).reshape(len(leaves), *first.shape) if first.ndim else np.stack(leaves)

    return jax.tree.map(stack, *batches)


_ARRAY = {np.ndarray}


def is_flat(batch: Any) -> bool:
    """Return whether a batch is a dict of host arrays, which can be handled without walking a tree."""
    return type(batch) is dict and set(map(type, batch.values())) <= _ARRAY


def row_count(batch: Any) -> int:
    """Return the length of the leading axis of a batch, which all its leaves share.

    Raises:
      ValueError: no array, a leaf without a leading axis, or two leaves that differ in it.
    """
    leaves = list(batch.values()) if is_flat(batch) else jax.tree.leaves(batch)
    sizes = {leaf.shape[:1] if type(leaf) is np.ndarray else np.shape(leaf)[:1] for leaf in leaves}
    if len(sizes) != 1 or () in sizes:
        found = {path: np.shape(leaf) for path, leaf in paths.flatten(batch).items()} or "no array"
        raise ValueError(f"the arrays of a batch or a dataset must share their leading axis, got {found}")
    return sizes.pop()[0]


def pad_rows(batch: Any, size: int) -> Any:
    """Repeat the last row of every array until the batch has `size` rows."""
    missing = size - row_count(batch)
    return jax.tree.map(lambda leaf: np.concatenate([leaf, np.repeat(leaf[-1:], missing, axis=0)]), batch)


def with_mask(batch: Any, mask: np.ndarray) -> dict[Any, Any]:
    """Add the mask of the real rows.

    Args:
      batch: a dict of arrays with leading axis B.
      mask: bool[B], True for a real row.

    Raises:
      TypeError: the batch is not a dict. ValueError: it has an entry of that name.
    """
    if not isinstance(batch, Mapping):
        raise TypeError(
            f"a batch that may be padded must be a dict, to which {MASK!r} (bool[B], True = a real row) is added, got "
            f"{type(batch).__name__}: return a dict, or use drop_last=True"
        )
    if MASK in batch:
        raise ValueError(
            f"the batch must not have an entry {MASK!r}; with drop_last=False it marks the real rows: rename the entry"
        )
    return {**batch, MASK: mask}


def _difference(samples: Sequence[Any]) -> str:
    """Return the difference that keeps the samples from being stacked."""
    first = paths.flatten(samples[0])
    structure: Any = jax.tree.structure(samples[0])
    for index, sample in enumerate(samples):
        if jax.tree.structure(sample) != structure:
            return f"samples of a batch have the same structure; found {structure} and {jax.tree.structure(sample)}"
        for path, leaf in paths.flatten(sample).items():
            if np.shape(leaf) != np.shape(first[path]):
                return (
                    f"samples of a batch have the same shapes; {path!r} is {np.shape(first[path])} in the first and "
                    f"{np.shape(leaf)} in sample {index} of the batch: pad or crop it, or give a collate_fn"
                )
    return "the samples of a batch cannot be stacked"
