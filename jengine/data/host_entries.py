"""Separation between arrays, which go to the device, and what stays on the host: names, ids,
dates, objects.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np

from jengine.config import paths

Batch = Any  # a pytree with arrays, which go to the device, and host entries
Sample = Any  # likewise, of one example

# Kinds of NumPy dtypes without a form on the device: objects, strings, bytes, dates and durations.
HOST_KINDS = frozenset("OUSMm")


def is_array(leaf: object) -> bool:
    """Return whether a leaf can be stored on a device: a numeric or boolean array, or a number."""
    if isinstance(leaf, np.ndarray | np.generic):
        return leaf.dtype.kind not in HOST_KINDS
    return isinstance(leaf, jax.Array | bool | int | float | complex) or hasattr(
        leaf, "__jax_array__"
    )


def select_arrays(batch: Batch) -> Batch:
    """Return a batch without host entries; the batch itself if it has none.

    Entries in dicts are left out. Entries in tuples and lists become None, so that the other
    positions stay.

    >>> select_arrays({"x": np.zeros(2), "file": np.array(["a", "b"])})
    {'x': array([0., 0.])}
    """
    # The usual batch needs no copy: strings, which stay on the host, are looked for first.
    if type(batch) is dict:
        for leaf in batch.values():
            if type(leaf) is np.ndarray:
                if leaf.dtype.kind in HOST_KINDS:
                    break
            elif not isinstance(leaf, jax.Array):
                break
        else:
            return batch
    elif all(map(is_array, jax.tree.leaves(batch))):
        return batch
    return _prune(batch)


def put_arrays(batch: Batch, put: Callable[[Batch], Batch]) -> Batch:
    """Send the arrays in a batch to the device, with one call to `put`.

    Host entries stay where they are.
    """
    arrays = select_arrays(batch)
    # one transfer for all arrays
    return put(batch) if arrays is batch else _merge(batch, put(arrays))


def list_host_entries(batch: Batch) -> dict[str, str]:
    """Return the host entries by dotted path, each with a dtype or type."""
    leaves = paths.flatten(batch).items()
    return {
        path: str(getattr(leaf, "dtype", type(leaf).__name__))
        for path, leaf in leaves
        if not is_array(leaf)
    }


def _prune(node: Batch) -> Batch:
    if isinstance(node, Mapping):
        pruned = {key: _prune(value) for key, value in node.items()}
        # A None of the user's own is part of the structure and stays.
        return {
            key: value for key, value in pruned.items() if value is not None or node[key] is None
        }
    if jax.tree_util.all_leaves([node]):
        return node if is_array(node) else None
    return jax.tree.map(_prune, node, is_leaf=lambda child: child is not node)


def _merge(batch: Batch, arrays: Batch) -> Batch:
    """Return `batch` with the leaves from `arrays`, and its own where `arrays` has none."""
    if isinstance(batch, Mapping):  # `jax.tree.map` would sort the keys
        return {
            key: _merge(value, arrays[key]) if key in arrays else value
            for key, value in batch.items()
        }
    if arrays is None or jax.tree_util.all_leaves([batch]):
        return batch if arrays is None else arrays
    return jax.tree.map(_merge, batch, arrays, is_leaf=lambda child: child is not batch)
