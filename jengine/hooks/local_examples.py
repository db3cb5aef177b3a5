"""Fetch the examples of this process from arrays of a batch or of predictions."""

from typing import Any

import jax
import numpy as np

PyTree = Any


def fetch_local_examples(tree: PyTree) -> PyTree:
    """Return arrays on the host, in one transfer; of an array on several processes, the examples on this one."""
    return jax.device_get(jax.tree.map(_local_examples, tree))


def concatenate_local_shards(array: jax.Array) -> np.ndarray:
    """Concatenate the shards on this process's devices of an array that is sharded along its first axis."""
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])


def _local_examples(leaf: Any) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return concatenate_local_shards(leaf)
