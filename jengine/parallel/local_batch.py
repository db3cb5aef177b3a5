"""Examples of this process from global arrays."""

from typing import Any

import jax
import numpy as np

from jengine.model.model import ArrayTree, Batch

PyTree = Any


def process_local_batch(tree: ArrayTree, batch: Batch) -> PyTree:
    """Return the examples that this process has loaded, from arrays with one entry per example in
    the global batch.

    All processes must call it, since arrays that are not sharded like the batch are exchanged.

    Args:
      tree: arrays. Those with a batch axis first are sliced, whatever the sharding; others must be
        replicated.
      batch: the global batch as the strategy has placed it; entries on the host belong to this
        process.

    Returns:
      `tree` with numpy arrays.

    Raises:
      ValueError: an array without a batch axis that is sharded.
    """
    global_array = next(
        (leaf for leaf in jax.tree.leaves(batch) if isinstance(leaf, jax.Array)), None
    )
    if global_array is None or global_array.is_fully_addressable:
        return tree
    shape = global_array.shape
    shards = (shard.index[0] if shape else slice(None) for shard in global_array.addressable_shards)
    # without duplicates
    local_spans = sorted({index.indices(shape[0] if shape else 1)[:2] for index in shards})

    def select(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array):
            return leaf
        has_batch_axis = leaf.ndim > 0 and leaf.shape[0] == global_array.shape[0]
        if leaf.is_fully_replicated:
            if not has_batch_axis:
                return leaf
            return np.concatenate([np.asarray(leaf)[start:stop] for start, stop in local_spans])
        if not has_batch_axis:
            raise ValueError(
                f"predictions must have the batch axis of {global_array.shape[0]} examples first, "
                "so that a metric on the host gets those of its process, got an array of the "
                f"shape {leaf.shape} with {leaf.sharding}"
            )
        # XLA may have sharded other axes, of classes for instance
        leaf = jax.device_put(leaf, global_array.sharding)
        return concatenate_local_shards(leaf)

    return jax.tree.map(select, tree)


def concatenate_local_shards(array: jax.Array) -> np.ndarray:
    """Concatenate the local shards of an array that is sharded along the first axis."""
    shards = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return np.concatenate([np.asarray(shards[start]) for start in sorted(shards)])
