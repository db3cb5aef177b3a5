"""Select a process's own rows of arrays divided over several processes, and gather lists of all processes."""

import base64
import pickle
from typing import Any

import jax
import numpy as np

from jengine.distributed.processes import Processes, SingleProcess

PyTree = Any

_CHUNK = 2**20  # characters; the limit of the coordination service is four times as many


def process_local_batch(tree: PyTree, batch: PyTree) -> PyTree:
    """Return the rows that this process read, of arrays with one for each row of the whole batch.

    Args:
      tree: pytree of arrays; with the batch axis first they are cut, others must have a copy everywhere.
      batch: the batch as placed by the strategy, which determines the rows of each process.

    Returns:
      `tree` with numpy arrays.

    Raises:
      ValueError: an array that is not divided like the batch.
    """
    whole = jax.tree.leaves(batch)[0]
    mine = _spans(whole)

    def cut(leaf: Any) -> Any:
        """Return the rows of this process."""
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        has_rows = leaf.ndim > 0 and leaf.shape[0] == whole.shape[0]
        if leaf.is_fully_replicated:
            return np.concatenate([np.asarray(leaf)[start:stop] for start, stop in mine]) if has_rows else leaf
        shards = {_span(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        whole_rows = all(data.shape[1:] == leaf.shape[1:] for data in shards.values())
        if not has_rows or not whole_rows or sorted(shards) != mine:
            raise ValueError(
                f"a prediction of the shape {leaf.shape} lies on the devices as {leaf.sharding}, not by rows as the "
                "batch does: a metric on the host needs the rows of its own process"
            )
        return np.concatenate([np.asarray(shards[span]) for span in mine])

    return jax.tree.map(cut, tree)


def all_gather_objects(values: list[Any], processes: SingleProcess | Processes) -> list[Any]:
    """Return the lists of all processes as one, in their order; every process calls it.

    The values are sent by the host, because devices may still be busy.

    Args:
      values: anything that pickles.
      processes: those of the run.
    """
    text = base64.b64encode(pickle.dumps(values)).decode()
    chunks = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
    most = max(processes.all_gather("the size of the results", len(chunks)))
    sent = [processes.all_gather("the results", "".join(chunks[i : i + 1])) for i in range(most)]
    texts = ["".join(parts) for parts in zip(*sent, strict=True)]
    return [value for own in texts for value in pickle.loads(base64.b64decode(own))]


def _spans(array: jax.Array) -> list[tuple[int, int]]:
    """Return the row ranges on this process's devices, each once, in order."""
    return sorted({_span(shard.index, array.shape) for shard in array.addressable_shards})


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    start, stop, _ = (index[0] if index else slice(None)).indices(shape[0] if shape else 1)
    return start, stop
