"""JSON codec for checkpoints, manifests, logs, reports and messages between processes.

JSON has neither NaN nor infinities, and no tuples, bytes or arrays. `encode` writes a float that is not finite as
`{"$float": "NaN"}`, which `decode` reads; in lines for other programs it is the string "NaN". `pack` keeps the types of
all values, for states that must come back as they were.
"""

import base64
import json
import math
from collections.abc import Callable, Mapping
from typing import Any, TypeAlias

import numpy as np

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"  # what JSON can represent

_FLOAT = "$float"  # the key of the objects that stand for NaN and infinities
_PACKED = "__jengine__"  # the key of the objects that stand for values of other types
_encode_plain = json.JSONEncoder(allow_nan=False).encode
_SCALARS = frozenset({type(None), str, bool, int, float})


def encode(value: object, path: str = "", *, for_logs: bool = False, **layout: Any) -> str:
    """Return a value as JSON text.

    Args:
      value, path, for_logs: see `to_plain`; `for_logs` also writes NaN and infinities as strings, which `float` reads.
      **layout: arguments of `json.dumps`, such as `indent`.

    Raises:
      TypeError: see `to_plain`.

    >>> encode({"loss": float("nan"), "shape": (2, 3)})
    '{"loss": {"$float": "NaN"}, "shape": [2, 3]}'
    >>> encode({"loss": float("nan")}, for_logs=True)
    '{"loss": "NaN"}'
    """
    if for_logs and not layout:  # fast path: log lines are numbers and strings
        try:
            return _encode_plain(value)
        except (TypeError, ValueError):
            pass
    plain = to_plain(value, path, for_logs=for_logs)
    try:
        return json.dumps(plain, allow_nan=False, **layout)
    except ValueError:  # rare, so the usual value is not searched for NaN first
        return json.dumps(_replace_nonfinite(plain, for_logs), allow_nan=False, **layout)


def decode(text: str | bytes) -> Any:
    """Return the value that `encode` was given, with JSON's types; a bare NaN of earlier versions is read too.

    >>> decode('{"best": {"$float": "-Infinity"}}')
    {'best': -inf}
    """
    return json.loads(text, object_hook=lambda entry: float(str(entry[_FLOAT])) if entry.keys() == {_FLOAT} else entry)


def to_plain(value: object, path: str = "", *, for_logs: bool = False, arrays: bool = True) -> Json:
    """Convert a value to JSON's types: tuples and arrays become lists, NumPy scalars become numbers.

    Args:
      value: numbers, strings, None, arrays, and lists, tuples and dicts of them.
      path: its dotted path for errors.
      for_logs: arrays with one element become numbers, and dict keys become strings.
      arrays: False refuses arrays, so only NumPy scalars are converted.

    Raises:
      TypeError: a value that JSON cannot represent, or a dict key that is not a string.
    """
    if value is None or (isinstance(value, str | bool | int | float) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, list | tuple):
        if _SCALARS.issuperset(map(type, value)):  # fast path: histories are long
            return list(value)
        return [to_plain(x, f"{path}.{i}", for_logs=for_logs, arrays=arrays) for i, x in enumerate(value)]
    if isinstance(value, Mapping):
        result = {}
        for key, item in value.items():
            if not isinstance(key, str) and not for_logs:
                raise TypeError(f"the keys of `{path}` must be strings, got {key!r}")
            item_path = f"{path}.{key}" if path else str(key)
            result[str(key)] = to_plain(item, item_path, for_logs=for_logs, arrays=arrays)
        return result
    if isinstance(value, np.generic) or (arrays and hasattr(value, "__array__")):
        array = np.asarray(value)
        if array.dtype.kind in "biufVU":  # V: bfloat16 and its like
            return array.item() if for_logs and array.size == 1 else array.tolist()
    raise TypeError(f"`{path}` must be JSON-serializable (a number, string, list or dict), got {type(value).__name__}")


def pack(value: Any) -> Any:
    """Convert nested dicts, lists, tuples, numbers, bytes, arrays and CPU tensors to JSON's types without loss.

    Raises:
      TypeError: a value of another kind.

    >>> pack((1, 2))
    {'__jengine__': 'tuple', 'data': [1, 2]}
    >>> unpack(pack({3: b"x"}))
    {3: b'x'}
    """
    if value is None or (isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)):
        return value
    if isinstance(value, bytes):
        return {_PACKED: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return pack(value.item())
    if isinstance(value, list):
        return [pack(item) for item in value]
    if isinstance(value, tuple):
        return {_PACKED: "tuple", "data": [pack(item) for item in value]}
    if isinstance(value, dict):
        if all(isinstance(key, str) for key in value) and _PACKED not in value:
            return {key: pack(item) for key, item in value.items()}
        return {_PACKED: "dict", "data": [[pack(key), pack(item)] for key, item in value.items()]}
    kind = "tensor" if hasattr(value, "detach") else "array"
    array = np.asarray(value.detach().cpu() if kind == "tensor" else value)
    if array.dtype.kind not in "biuf":
        raise TypeError(f"the state of a data source must be numbers, strings, bytes and arrays, got {value!r}")
    return {_PACKED: kind, "data": pack(array.tobytes()), "dtype": array.dtype.str, "shape": list(array.shape)}


def unpack(value: Json) -> Any:
    """Return the value that `pack` was given. Nothing in it can run code."""
    if isinstance(value, list):
        return [unpack(item) for item in value]
    if not isinstance(value, dict):
        return value
    if _PACKED not in value:
        return {key: unpack(item) for key, item in value.items()}
    return _UNPACKERS[str(value[_PACKED])](value)


def _unpack_array(value: dict[str, Any]) -> np.ndarray:
    data = np.frombuffer(unpack(value["data"]), np.dtype(value["dtype"]))
    return data.reshape(value["shape"]).copy()


def _unpack_tensor(value: dict[str, Any]) -> Any:
    import torch

    return torch.from_numpy(_unpack_array(value))


_UNPACKERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "bytes": lambda value: base64.b64decode(value["data"]),
    "tuple": lambda value: tuple(unpack(item) for item in value["data"]),
    "dict": lambda value: {unpack(key): unpack(item) for key, item in value["data"]},
    "array": _unpack_array,
    "tensor": _unpack_tensor,
}


def _replace_nonfinite(value: Json, as_text: bool) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        text = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return text if as_text else {_FLOAT: text}
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item, as_text) for key, item in value.items()}
    return [_replace_nonfinite(item, as_text) for item in value] if isinstance(value, list) else value
