"""Select the examples of one process from global arrays, and gather lists from all processes."""

import base64
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.distributed.processes import Processes, SingleProcess

PyTree = Any

_CHUNK_SIZE = 2**20  # characters; the coordination service allows four times as many


def process_local_batch(tree: PyTree, batch: PyTree) -> PyTree:
    """Return the examples that this process has loaded, from arrays with one entry per example of the global batch.

    Args:
      tree: pytree of arrays. Arrays with a batch axis first are sliced; others must be replicated.
      batch: the global batch as placed by the strategy, which determines the examples of each process.

    Returns:
      `tree` with numpy arrays.

    Raises:
      ValueError: an array that is not sharded like the batch.
    """
    global_array = jax.tree.leaves(batch)[0]
    local_spans = _spans(global_array)

    def select(leaf: Any) -> Any:
        """Return the examples of this process."""
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
            return leaf
        has_batch_axis = leaf.ndim > 0 and leaf.shape[0] == global_array.shape[0]
        if leaf.is_fully_replicated:
            if not has_batch_axis:
                return leaf
            return np.concatenate([np.asarray(leaf)[start:stop] for start, stop in local_spans])
        shards = {_span(shard.index, leaf.shape): shard.data for shard in leaf.addressable_shards}
        complete = all(data.shape[1:] == leaf.shape[1:] for data in shards.values())
        if not has_batch_axis or not complete or sorted(shards) != local_spans:
            raise ValueError(
                "predictions must be sharded along the batch axis like the batch, so that a metric on the host gets "
                f"the examples of its process, got an array of the shape {leaf.shape} with {leaf.sharding}"
            )
        return np.concatenate([np.asarray(shards[span]) for span in local_spans])

    return jax.tree.map(select, tree)


def all_gather_objects(values: list[Any], name: str, processes: SingleProcess | Processes) -> list[Any]:
    """Return the lists of all processes joined into one, in the order of the processes; all of them must call it.

    The values are sent by the host, because devices may still be busy, as JSON with the bytes of arrays.

    Args:
      values: None, bools, numbers, strings, bytes, NumPy arrays and scalars, and lists, tuples and dicts of these. They
        arrive as the same types and bits; JAX arrays arrive as NumPy arrays.
      name: the metric or hook that they belong to, for errors.
      processes: the processes of the run; a single one gets `values` itself.

    Raises:
      TypeError: a value of another type, named with its position.
    """
    if processes.count == 1:
        return values
    text = json.dumps([_encode(value, f"{name}: results[{i}]") for i, value in enumerate(values)])
    chunks = [text[i : i + _CHUNK_SIZE] for i in range(0, len(text), _CHUNK_SIZE)]
    most = max(processes.all_gather("the size of the results", len(chunks)))
    gathered = [processes.all_gather("the results", "".join(chunks[i : i + 1])) for i in range(most)]
    texts = ["".join(parts) for parts in zip(*gathered, strict=True)]
    return [_decode(value) for text in texts for value in json.loads(text)]


def _encode(value: Any, where: str) -> Any:
    """Return `value` in JSON's types; what JSON lacks as `{type: ...}`."""
    if value is None or type(value) in (bool, int, float, str):
        return value
    if isinstance(value, np.ndarray | np.generic | jax.Array) and _is_plain(value.dtype):
        array = np.asarray(value)
        array = array.astype(array.dtype.newbyteorder("="))
        kind = "scalar" if isinstance(value, np.generic) else "array"
        # The names of the dtypes of strings do not build them, nor do the codes of bfloat16 and its like.
        dtype = array.dtype.str if array.dtype.kind in "USmM" else array.dtype.name
        return {kind: [dtype, array.shape, _text(array.tobytes())]}
    if type(value) is bytes:
        return {"bytes": _text(value)}
    if type(value) in (list, tuple):
        items = [_encode(item, f"{where}[{i}]") for i, item in enumerate(value)]
        return items if type(value) is list else {"tuple": items}
    if type(value) is dict:
        return {"dict": [[_encode(k, f"{where} key"), _encode(v, f"{where}[{k!r}]")] for k, v in value.items()]}
    kind = f"an array of {value.dtype}" if hasattr(value, "dtype") else type(value).__qualname__
    raise TypeError(
        f"{where} must be None, a bool, a number, a string, bytes, a NumPy array, or a list, tuple or dict of these, "
        f"to be sent to other processes, got {kind}"
    )


def _decode(value: Any) -> Any:
    """Return the value that `_encode` was given."""
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "bytes":
        return base64.b64decode(content)
    if kind == "tuple":
        return tuple(map(_decode, content))
    if kind == "dict":
        return {_decode(k): _decode(v) for k, v in content}
    dtype, shape, data = content
    array: Any = np.ndarray(shape, jnp.dtype(dtype), bytearray(base64.b64decode(data)))
    return array[()] if kind == "scalar" else array


def _is_plain(dtype: Any) -> bool:
    """Return whether the bytes of an array are its values: no Python objects, fields or PRNG keys."""
    return isinstance(dtype, np.dtype) and not dtype.hasobject and dtype.names is None and dtype.subdtype is None


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _spans(array: jax.Array) -> list[tuple[int, int]]:
    """Return the ranges of examples on the devices of this process, without duplicates, in order."""
    return sorted({_span(shard.index, array.shape) for shard in array.addressable_shards})


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    start, stop, _ = (index[0] if index else slice(None)).indices(shape[0] if shape else 1)
    return start, stop
