"""JSON descriptions of values and objects, to compare two processes, or a run and its checkpoint.

Equal values have equal descriptions in every process: there are no addresses, and nothing depends
on hash seeds.
"""

import contextlib
import datetime
import decimal
import enum
import fractions
import functools
import hashlib
import inspect
import itertools
import json
import math
import os
import re
import sys
import sysconfig
import types
import weakref
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import numpy as np

Description: TypeAlias = (
    "bool | int | float | str | list[Description] | dict[str, Description] | None"
)

_MAX_DEPTH = 24
_MAX_ITEMS = 64  # of a list; a longer one is described by as many of its items and a hash
_MAX_TEXT = 200  # characters
_MAX_BYTES = 2**20  # of an array; a larger one is described by rows of at most this size together
_MAX_ROWS = 256
_HAS_DOCSTRING = 0x4000000  # in `co_flags`, since Python 3.14
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("purelib", "platlib", "stdlib"))
_WITH_REPR = (
    bytes,
    complex,
    range,
    slice,
    re.Pattern,
    datetime.date,
    datetime.time,
    datetime.timedelta,
    decimal.Decimal,
    fractions.Fraction,
)

_arguments: dict[int, dict[str, Any]] = {}  # by the ID of the object that was built with them


def record_arguments(built: object, arguments: Mapping[str, Any]) -> None:
    """Record an object's constructor arguments for `describe`, unless they are attributes.

    They are described now, so that they are not kept in memory.
    """
    missing = {
        name: value
        for name, value in arguments.items()
        if name != "self" and name not in _attributes(built)
    }
    if missing and id(built) not in _arguments:  # a constructor calls that of its base class
        try:
            weakref.finalize(built, _arguments.pop, id(built), None).atexit = False
        except TypeError:  # a class with slots
            return
        _arguments[id(built)] = {name: describe(value) for name, value in missing.items()}


def describe(value: object, *, shallow: bool = False) -> Description:
    """Return a description with JSON's types.

    An object is described by class and constructor arguments, as far as they are attributes with
    the same name, or recorded; a function by name and a hash of the code, with defaults and the
    values that it closes over; an array by shape, dtype and a hash over at most 1 MiB.

    >>> describe({"lr": 0.1, "betas": (0.9, float("nan"))})
    {'lr': 0.1, 'betas': [0.9, 'nan']}

    Args:
      value: anything.
      shallow: describe objects only by class, and functions without what they close over.
    """
    return _Describer(shallow).describe(value)


def flatten_description(description: Description, path: str = "") -> dict[str, Description]:
    """Return the leaves in a description by path.

    >>> flatten_description({"custom_hooks": [{"momentum": 0.1}]})
    {'custom_hooks[0].momentum': 0.1}
    """
    if isinstance(description, dict):
        items = [(f"{path}.{key}" if path else key, item) for key, item in description.items()]
    elif isinstance(description, list):
        items = [(f"{path}[{i}]", item) for i, item in enumerate(description)]
    else:
        return {path: description}
    return {
        key: leaf for item in items for key, leaf in flatten_description(item[1], item[0]).items()
    }


def first_difference(one: object, other: object, path: str = "") -> tuple[str, str, str] | None:
    """Return the path and the two values at which nested dicts and lists first differ.

    None if they are equal.

    >>> first_difference({"lr": [0.1, 0.2]}, {"lr": [0.1, 0.3]})
    ('lr[1]', '0.2', '0.3')
    """
    if isinstance(one, dict) and isinstance(other, dict):
        keys = [*one, *(key for key in other if key not in one)]
        pairs = [
            (f"{path}.{key}" if path else key, one.get(key, ...), other.get(key, ...))
            for key in keys
        ]
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        pairs = [(f"{path}[{i}]", a, b) for i, (a, b) in enumerate(zip(one, other, strict=True))]
    else:
        both_nan = one != one and other != other
        if one == other or both_nan:
            return None
        first, second = ("nothing" if value is ... else repr(value) for value in (one, other))
        return path, first, second
    differences = (first_difference(a, b, item_path) for item_path, a, b in pairs)
    return next((difference for difference in differences if difference is not None), None)


def hash_array(array: np.ndarray[Any, Any]) -> str:
    """Return a hash over an array's shape, dtype and elements.

    Over evenly spaced rows in a large one.
    """
    if array.nbytes > _MAX_BYTES:
        rows = array[np.linspace(0, len(array) - 1, min(len(array), _MAX_ROWS)).astype(np.int64)]
        rows = rows.reshape(len(rows), -1)
        array = rows[:, :: -(-rows.nbytes // _MAX_BYTES)]
    return hash_text(f"{array.dtype}{array.shape}".encode() + array.tobytes())


def hash_text(text: str | bytes) -> str:
    """Return a short hash."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()[:16]


class _Describer:
    def __init__(self, shallow: bool) -> None:
        self._shallow = shallow
        self._open: list[int] = []  # the IDs of the objects around the current one

    def describe(self, value: object) -> Description:
        if value is None or (isinstance(value, bool | int) and not isinstance(value, enum.Enum)):
            return value
        if isinstance(value, float) and not isinstance(value, np.generic):
            return value if math.isfinite(value) else repr(value)
        if isinstance(value, str) and not isinstance(value, enum.Enum):
            return (
                str(value)
                if len(value) <= _MAX_TEXT
                else f"{value[:_MAX_TEXT]}… {hash_text(value)}"
            )
        if id(value) in self._open or len(self._open) > _MAX_DEPTH:
            return _name(type(value))
        self._open.append(id(value))
        try:
            return self._describe_other(value)
        except Exception:
            # a foreign object may refuse anything; a run must not depend on its description
            return _name(type(value))
        finally:
            self._open.pop()

    def _describe_other(self, value: Any) -> Any:
        if isinstance(value, type):
            return _name(value)
        if isinstance(value, enum.Enum):
            return f"{_name(type(value))}.{value.name}"
        if isinstance(value, np.dtype):
            return value.name
        if isinstance(value, os.PathLike):
            return os.fspath(value)
        if isinstance(value, _WITH_REPR):
            return self.describe(repr(value))
        # `nnx.Rngs` has every attribute
        if hasattr(type(value), "shape") and hasattr(type(value), "dtype"):
            return _describe_array(value)
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            fields = zip(value._fields, value, strict=True)
            return {
                "type": _name(type(value)),
                **{name: self.describe(item) for name, item in fields},
            }
        if hasattr(type(value), "items"):
            function = value.get("type") if isinstance(value, dict) else None
            described = (
                dict(self._describe_function(function))
                if isinstance(function, types.FunctionType)
                else {}
            )
            # as a `functools.partial`
            keys = value.keys() - {"type"} if described else value.keys()
            return {
                **described,
                **{str(key): self.describe(item) for key, item in value.items() if key in keys},
            }
        if isinstance(value, set | frozenset):
            return sorted((self.describe(item) for item in value), key=repr)
        if type(value) in (list, tuple):  # a subclass may load its items
            return self._describe_items(value)
        if isinstance(value, functools.partial):
            function = self.describe(value.func)
            named = function if isinstance(function, dict) else {"function": function}
            keywords = {key: self.describe(item) for key, item in value.keywords.items()}
            return {**named, "args": self.describe(value.args), **keywords}
        if isinstance(value, types.MethodType):
            return {"function": value.__func__.__qualname__, "self": self.describe(value.__self__)}
        if isinstance(value, types.FunctionType):
            return self._describe_function(value)
        # `jax.jit` and its like
        if isinstance(getattr(value, "__wrapped__", None), types.FunctionType):
            return self.describe(value.__wrapped__)
        if hasattr(value, "__qualname__"):  # a function in C
            return _name(value)
        if (jax := sys.modules.get("jax")) is not None and isinstance(
            value, jax.sharding.PartitionSpec
        ):
            return self.describe(tuple(value))
        if jax is not None and isinstance(value, jax.sharding.Mesh):
            return {
                "type": "Mesh",
                **value.shape,
                "axis_types": [kind.name for kind in value.axis_types],
            }
        return self._describe_object(value)

    def _describe_items(self, items: Sequence[object]) -> Description:
        if len(items) <= _MAX_ITEMS:
            return [self.describe(item) for item in items]
        chosen = np.linspace(0, len(items) - 1, _MAX_ITEMS).astype(int)
        sample = [self.describe(items[i]) for i in chosen]
        return {"length": len(items), "hash": hash_text(json.dumps(sample, sort_keys=True))}

    def _describe_function(self, function: types.FunctionType) -> dict[str, Any]:
        described: dict[str, Any] = {"function": _name(function)}
        if not _is_of_library(function.__module__):
            described["code"] = hash_text(repr(_describe_code(function.__code__)))
        if self._shallow:
            return described
        if function.__defaults__ or function.__kwdefaults__:
            parameters = inspect.signature(function).parameters.values()
            described |= {
                p.name: self.describe(p.default) for p in parameters if p.default is not p.empty
            }
        for name, cell in zip(
            function.__code__.co_freevars, function.__closure__ or (), strict=True
        ):
            with contextlib.suppress(ValueError):  # not set yet
                described[name] = self.describe(cell.cell_contents)
        return described

    def _describe_object(self, value: object) -> Description:
        if self._shallow:
            return f"<{_name(type(value))}>"
        attributes = _attributes(value)
        described = dict(_arguments.get(id(value), {}))
        prefixes = ("",) if _is_of_library(type(value).__module__) else ("_", "")
        with contextlib.suppress(TypeError, ValueError):  # a class without a signature
            for name, prefix in itertools.product(
                inspect.signature(type(value)).parameters, prefixes
            ):
                if f"{prefix}{name}" in attributes:
                    described[name] = self.describe(attributes[f"{prefix}{name}"])
        return {"type": _name(type(value)), **described}


def _describe_array(value: Any) -> str:
    """Describe an array in NumPy or JAX, or another object with a shape and a dtype.

    Values on a device if small.
    """
    if isinstance(value, np.generic):
        return repr(value)
    text = f"{value.dtype}{list(value.shape)}"
    if not isinstance(value, np.ndarray):
        try:
            if value.nbytes > _MAX_BYTES or not getattr(value, "is_fully_addressable", True):
                return text
            value = np.asarray(value)
        except Exception:  # a tracer, a random key, a tensor of another library on a device
            return text
    if value.dtype.hasobject:
        return text
    return f"{text} {value.item()!r}" if value.ndim == 0 else f"{text} {hash_array(value)}"


def _attributes(value: object) -> dict[str, Any]:
    slots = (
        name
        for kind in type(value).__mro__
        for name in vars(kind).get("__slots__", ())
        if isinstance(name, str)
    )
    return {name: getattr(value, name) for name in slots if hasattr(value, name)} | getattr(
        value, "__dict__", {}
    )


def _name(named: Any) -> str:
    """Return the dotted name; a script's has the script's name, under which a config imports it."""
    module = getattr(named, "__module__", None)
    if module == "__main__" and (file := getattr(sys.modules["__main__"], "__file__", None)):
        module = os.path.splitext(os.path.basename(file))[0]
    return f"{module}.{named.__qualname__}"


@functools.cache
def _is_of_library(module: str | None) -> bool:
    """Return whether a module is installed, or part of jengine: versions are compared, not code."""
    file = getattr(sys.modules.get(module or ""), "__file__", None)
    return (module or "").partition(".")[0] == "jengine" or (file or "").startswith(_LIBRARIES)


def _describe_code(code: types.CodeType) -> tuple[Any, ...]:
    """Return a function's code, without what comments, file names and line numbers change."""
    consts: Sequence[Any] = code.co_consts
    has_docstring = code.co_flags & _HAS_DOCSTRING or sys.version_info < (3, 14)
    if has_docstring and consts and isinstance(consts[0], str) and code.co_name != "<lambda>":
        consts = consts[1:]
    return (
        code.co_code,
        code.co_names,
        code.co_varnames,
        code.co_freevars,
        *map(_describe_constant, consts),
    )


def _describe_constant(value: object) -> object:
    if isinstance(value, types.CodeType):
        return _describe_code(value)
    return sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)
