"""Convert states between different numbers of replicas, which are the leading axis of some leaves."""

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from jengine import paths

PyTree = Any


def is_per_replica(path: str) -> bool:
    """Return whether the leaf of a training state at this dotted path has a leading replica axis."""
    item, *rest = path.split(".")
    if item == "hook_state":
        return "model_state" in rest[1:2]
    return item == "model_state" or (item == "opt_state" and rest[1:2] in (["accumulated_grads"], ["weight_sum"]))


def map_per_replica(fn: Callable[[Any], Any], state: PyTree) -> PyTree:
    """Apply `fn` to the per-replica leaves of `state`, a training state or a dict of its items."""
    return paths.map_with_path(lambda path, leaf: fn(leaf) if is_per_replica(path) else leaf, state)


def convert_replica_axis(state: PyTree, before: int | None, after: int | None) -> PyTree:
    """Convert a state to another number of replicas.

    Statistics and accumulated gradients are averaged, as in an update; other values are taken from the first replica.
    Every new replica gets a copy.

    Args:
      state: a training state, or a dict of its items.
      before: its number of replicas; None for a state without a replica axis.
      after: the new number of replicas; None for no replica axis.

    Returns:
      `state` itself if both are equal; otherwise with NumPy arrays for the per-replica leaves.
    """
    if before == after:
        return state

    def convert(leaf: Any) -> np.ndarray:
        value = np.asarray(leaf)
        if before is not None:
            is_floating = jax.numpy.issubdtype(value.dtype, np.floating)
            value = value.mean(axis=0, dtype=np.float32).astype(value.dtype) if is_floating else value[0]
        return value if after is None else np.broadcast_to(value, (after, *value.shape))

    return map_per_replica(convert, state)
