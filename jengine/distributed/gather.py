"""Select a process's own rows of arrays divided over several processes, and gather lists of all processes."""

import base64
import json
from typing import Any

import jax
import jax.numpy as jnp
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
                f"a prediction of the shape {leaf.shape} is divided over devices as {leaf.sharding}, not by rows as "
                "the batch: a metric on the host needs the rows of its own process"
            )
        return np.concatenate([np.asarray(shards[span]) for span in mine])

    return jax.tree.map(cut, tree)


def all_gather_objects(values: list[Any], name: str, processes: SingleProcess | Processes) -> list[Any]:
    """Return the lists of all processes as one, in their order; every process calls it.

    The values are sent by the host, because devices may still be busy, as JSON with the bytes of arrays.

    Args:
      values: None, bools, numbers, strings, bytes, NumPy arrays and scalars, and lists, tuples and dicts of these. They
        arrive as the same types and bits; JAX arrays arrive as NumPy arrays.
      name: the metric or hook that they belong to, for errors.
      processes: those of the run. A single one gets `values` itself.

    Raises:
      TypeError: a value of another type, named with its position.
    """
    if processes.count == 1:
        return values
    text = json.dumps([_encode(value, f"{name}: results[{i}]") for i, value in enumerate(values)])
    chunks = [text[i : i + _CHUNK] for i in range(0, len(text), _CHUNK)]
    most = max(processes.all_gather("the size of the results", len(chunks)))
    sent = [processes.all_gather("the results", "".join(chunks[i : i + 1])) for i in range(most)]
    texts = ["".join(parts) for parts in zip(*sent, strict=True)]
    return [_decode(value) for own in texts for value in json.loads(own)]


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
    """Return the row ranges on this process's devices, each once, in order."""
    return sorted({_span(shard.index, array.shape) for shard in array.addressable_shards})


def _span(index: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[int, int]:
    start, stop, _ = (index[0] if index else slice(None)).indices(shape[0] if shape else 1)
    return start, stop
