"""JSON values for a data source's state, and back. Nothing in them can run code."""

import base64
from collections.abc import Callable
from typing import Any

import numpy as np

_KEY = "__jengine__"


def encode(value: Any) -> Any:
    """Return JSON values for nested dicts, lists, tuples, numbers, strings, bytes, arrays and CPU tensors.

    >>> decode(encode({"next": (3, b"x")}))
    {'next': (3, b'x')}

    Raises:
      TypeError: another kind of value, which a checkpoint cannot hold.
    """
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return {_KEY: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return encode(value.item())
    if isinstance(value, list):
        return [encode(item) for item in value]
    if isinstance(value, tuple):
        return {_KEY: "tuple", "data": [encode(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _KEY not in value:
            return {key: encode(item) for key, item in value.items()}
        return {_KEY: "dict", "data": [[encode(key), encode(item)] for key, item in value.items()]}
    kind = "tensor" if hasattr(value, "detach") else "array"
    array = np.asarray(value.detach().cpu() if kind == "tensor" else value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"the state of a data source must be numbers, strings, bytes and arrays, got {value!r}")
    return {_KEY: kind, "data": encode(array.tobytes()), "dtype": array.dtype.str, "shape": list(array.shape)}


def decode(value: Any) -> Any:
    """Return the value that `encode` was called with."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _KEY not in value:
        return {key: decode(item) for key, item in value.items()}
    return _DECODERS[value[_KEY]](value)


def _decode_array(value: dict[str, Any]) -> np.ndarray:
    data = np.frombuffer(decode(value["data"]), np.dtype(value["dtype"]))
    return data.reshape(value["shape"]).copy()


def _decode_tensor(value: dict[str, Any]) -> Any:
    import torch

    return torch.from_numpy(_decode_array(value))


_DECODERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bytes": lambda value: base64.b64decode(value["data"]),
    "tuple": lambda value: tuple(decode(item) for item in value["data"]),
    "dict": lambda value: {decode(key): decode(item) for key, item in value["data"]},
    "array": _decode_array,
    "tensor": _decode_tensor,
}
