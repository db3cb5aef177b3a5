"""The examples of a batch with which a step fails, found by halves."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from jengine.data.batch_check import Batch
from jengine.data.masking import get_mask

_MOST = 16  # a fault of all examples is none of an example


def find_examples(fails: Callable[[Batch], bool], batch: Batch) -> list[int]:
    """Return the indices of the examples with which alone a step fails, at most 16.

    >>> find_examples(lambda batch: bool(np.isnan(batch).any()), np.array([0.0, np.nan, 1.0]))
    [1]

    Args:
      fails: whether a step fails on a batch of the same shapes. The batch has one example, or some,
        again and again.
      batch: has the axis of examples first, real[B, ...].
    """
    leaves = jax.tree.leaves(batch)
    size = next((np.shape(leaf)[0] for leaf in leaves if np.ndim(leaf)), 0)
    mask = get_mask(batch)
    rows = np.arange(size) if mask is None else np.flatnonzero(np.asarray(mask))

    def search(rows: np.ndarray, found: list[int]) -> None:
        if len(found) >= _MOST or not len(rows) or not fails(_take(batch, rows, size)):
            return
        if len(rows) == 1:
            found.append(int(rows[0]))
            return
        half = len(rows) // 2
        search(rows[:half], found)
        search(rows[half:], found)

    found: list[int] = []
    search(rows, found)
    return found


def describe_examples(examples: Sequence[int], size: int) -> str:
    """Return the examples as part of a sentence; '' for none or all.

    >>> describe_examples([5], 16)
    'for example 5 of the batch'
    """
    if not examples or len(examples) == min(size, _MOST) > 1:
        return ""
    listed = ", ".join(map(str, examples))
    more = " and maybe more" if len(examples) >= _MOST else ""
    return f"for example{'s' * (len(examples) > 1)} {listed}{more} of the batch"


def _take(batch: Batch, rows: np.ndarray, size: int) -> Batch:
    """Return a batch with only these examples, repeated: the program is compiled for its size."""
    index = np.resize(rows, size)

    def take(leaf: Any) -> Any:
        if not np.ndim(leaf) or np.shape(leaf)[0] != size:
            return leaf
        taken = jax.device_get(leaf)[index]
        return jax.device_put(taken, leaf.sharding) if isinstance(leaf, jax.Array) else taken

    return jax.tree.map(take, batch)
