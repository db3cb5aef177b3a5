"""JSON codec for checkpoints, manifests, logs, reports and messages between processes.

JSON has neither NaN nor infinities, and no tuples, bytes or arrays. `encode` writes a float that is
not finite as `{"$float": "NaN"}`, which `decode` reads; in lines for other programs it is the
string "NaN". `pack` keeps the types of all values, for states that must come back as they were.
"""

import base64
import json
import math
from collections.abc import Mapping
from typing import Any, TypeAlias

import numpy as np

# what JSON can represent
Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

_FLOAT = "$float"  # the key of the objects that stand for NaN and infinities
_PACKED = "__jengine__"  # the key of the objects that stand for values of other types
_LARGE = 4096  # bytes
# of objects and lists in each other: each level costs Python stack wherever the value is walked
_MAX_DEPTH = 100
_TOO_DEEP = f"JSON must be nested at most {_MAX_DEPTH} levels deep"
_encode_plain = json.JSONEncoder(allow_nan=False).encode
_SCALARS = frozenset({type(None), str, bool, int, float})


def encode(value: object, path: str = "", *, for_logs: bool = False, **layout: Any) -> str:
    """Return a value as JSON text.

    Args:
      value, path, for_logs: see `to_plain`; `for_logs` also writes NaN and infinities as strings,
        which `float` reads.
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
    """Return the value that `encode` was given, with JSON's types.

    A bare NaN of earlier versions is read too.

    >>> decode('{"best": {"$float": "-Infinity"}}')
    {'best': -inf}

    Raises:
      ValueError: it is not JSON, or nested more than 100 levels deep.
    """
    try:
        value = json.loads(text, object_hook=_decode_float)
    except RecursionError:
        raise ValueError(_TOO_DEEP) from None
    level: list[Any] = [[value]]
    for _ in range(_MAX_DEPTH + 1):
        items = (
            x for parent in level for x in (parent.values() if isinstance(parent, dict) else parent)
        )
        level = [x for x in items if isinstance(x, dict | list)]
        if not level:
            return value
    raise ValueError(_TOO_DEEP)


def _decode_float(entry: dict[str, Any]) -> Any:
    return float(str(entry[_FLOAT])) if entry.keys() == {_FLOAT} else entry


def decode_object(text: str | bytes) -> dict[str, Any]:
    """Return the object that a JSON text is; raise ValueError for another value, and as `decode`.

    >>> decode_object("[1]")
    Traceback (most recent call last):
    ValueError: it must be a JSON object, got a list
    """
    value = decode(text)
    if not isinstance(value, dict):
        raise ValueError(f"it must be a JSON object, got a {type(value).__name__}")
    return value


def to_plain(value: object, path: str = "", *, for_logs: bool = False, arrays: bool = True) -> Json:
    """Convert a value to JSON's types: tuples and arrays become lists, NumPy scalars become
    numbers.

    Args:
      value: numbers, strings, None, arrays, and lists, tuples and dicts of them.
      path: its dotted path for errors.
      for_logs: arrays with one element become numbers, and dict keys become strings.
      arrays: False refuses arrays, so only NumPy scalars are converted.

    Raises:
      TypeError: a value that JSON cannot represent, or a dict key that is not a string.
    """
    if value is None or (
        isinstance(value, str | bool | int | float) and not isinstance(value, np.generic)
    ):
        return value
    if isinstance(value, list | tuple):
        if _SCALARS.issuperset(map(type, value)):  # fast path: histories are long
            return list(value)
        return [
            to_plain(x, f"{path}.{i}", for_logs=for_logs, arrays=arrays)
            for i, x in enumerate(value)
        ]
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
    raise TypeError(
        f"`{path}` must be JSON-serializable (a number, string, list or dict), got "
        f"{type(value).__name__}"
    )


def pack(value: Any, path: str = "", blobs: bytearray | None = None) -> Json:
    """Convert nested dicts, lists, tuples, numbers, bytes, arrays, PRNG keys and CPU tensors to
    JSON's types.

    Args:
      value: the value.
      path: its dotted path for errors.
      blobs: receives the bytes of large arrays, which would be slow and a third larger as text;
        None for none.

    Raises:
      TypeError: a value of another kind.

    >>> pack((1, 2))
    {'__jengine__': 'tuple', 'data': [1, 2]}
    >>> unpack(pack({3: b"x"}))
    {3: b'x'}
    """
    if value is None or (
        isinstance(value, bool | int | float | str) and not isinstance(value, np.generic)
    ):
        return value
    if isinstance(value, bytes | bytearray):
        if blobs is not None and len(value) >= _LARGE:
            blobs += value
            return {_PACKED: "blob", "stop": len(blobs), "size": len(value)}
        return {_PACKED: "bytes", "data": base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return pack(value.item(), path, blobs)
    if isinstance(value, list):
        return [pack(item, f"{path}.{i}", blobs) for i, item in enumerate(value)]
    if isinstance(value, tuple):
        return {
            _PACKED: "tuple",
            "data": [pack(item, f"{path}.{i}", blobs) for i, item in enumerate(value)],
        }
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value) and _PACKED not in value:
            return {key: pack(item, f"{path}.{key}", blobs) for key, item in value.items()}
        pairs: list[Json] = [
            [pack(key), pack(item, f"{path}.{key}", blobs)] for key, item in value.items()
        ]
        return {_PACKED: "dict", "data": pairs}
    return _pack_array(value, path, blobs)


def _pack_array(value: Any, path: str, blobs: bytearray | None) -> Json:
    kind = "array"
    entry = dict[str, Any]()
    if hasattr(value, "detach"):
        kind = "tensor"
        value = value.detach().cpu()
    elif str(getattr(value, "dtype", "")).startswith("key<"):
        import jax

        kind = "key"
        entry["impl"] = str(jax.random.key_impl(value))
        value = jax.random.key_data(value)
    array = np.asarray(value)
    # V: bfloat16 and its like
    if array.dtype.kind not in "biufcV" or array.dtype.names is not None:
        remedy = (
            "; leave it out, and make it again in `load_state_dict`"
            if ".state_dict()" in path
            else ""
        )
        raise TypeError(
            f"`{path}` must be made of numbers, strings, bytes, arrays, lists, tuples and dicts, "
            "got "
            f"{type(value).__name__} {getattr(value, '__qualname__', repr(value)):.100}{remedy}"
        )
    dtype = array.dtype.name if array.dtype.kind == "V" else array.dtype.str
    return {
        _PACKED: kind,
        "data": pack(array.tobytes(), path, blobs),
        "dtype": dtype,
        "shape": list(array.shape),
        **entry,
    }


def unpack(value: Json, blobs: bytes | None = None) -> Any:
    """Return the value that `pack` was given. Nothing in it can run code.

    Args:
      value: what `pack` returned.
      blobs: what it received; without them large arrays stay as the dicts that stand for them.
    """
    if isinstance(value, list):
        return [unpack(item, blobs) for item in value]
    if not isinstance(value, dict):
        return value
    entry: dict[str, Any] = value
    if _PACKED not in entry:
        return {key: unpack(item, blobs) for key, item in entry.items()}
    if entry[_PACKED] == "blob":
        if blobs is None:
            return entry
        found = blobs[entry["stop"] - entry["size"] : entry["stop"]]
        if len(found) != entry["size"]:
            raise ValueError(f"{entry['size']} bytes of an array are missing")
        return found
    kind = entry[_PACKED]
    data = unpack(entry["data"], blobs)
    if isinstance(data, dict):  # bytes that were not read
        return entry
    if kind == "bytes":
        return base64.b64decode(data)
    if kind == "tuple":
        return tuple(data)
    if kind == "dict":
        return dict(data)
    array = np.frombuffer(data, np.dtype(entry["dtype"])).reshape(entry["shape"]).copy()
    if kind == "tensor":
        import torch

        return torch.from_numpy(array)
    if kind == "key":
        import jax

        return jax.random.wrap_key_data(jax.numpy.asarray(array), impl=entry["impl"])
    return array


def _replace_nonfinite(value: Json, as_text: bool) -> Json:
    if isinstance(value, float) and not math.isfinite(value):
        text = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return text if as_text else {_FLOAT: text}
    if isinstance(value, dict):
        return {key: _replace_nonfinite(item, as_text) for key, item in value.items()}
    return (
        [_replace_nonfinite(item, as_text) for item in value] if isinstance(value, list) else value
    )
