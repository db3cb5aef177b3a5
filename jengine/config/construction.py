"""Configs of objects: the class and the constructor arguments, so that a run built in Python can be
built again.

Constructors that check their arguments, and those of hooks, models and metrics, record them here.
Of other classes only dataclasses (which all Linen modules are) and those whose constructor takes no
arguments can be described: reading arguments back from attributes would be a guess, and a config
that is a little wrong is worse than none.
"""

import copy
import dataclasses
import functools
import inspect
import itertools
import os
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from ml_collections import ConfigDict, FieldReference

_MAX_ITEMS = 1000  # of a list or an array; a longer one is data
_LITERALS = (bool, int, float, complex, str, bytes, types.NoneType, types.EllipsisType)


@dataclasses.dataclass(frozen=True)
class Unwritable:
    """Stand-in for a value that a config file cannot have, without a reference to the value."""

    kind: str  # what the value is: 'ndarray'
    instead: str = ""  # what to write in its place; "" for data, which a function has to return

    def __repr__(self) -> str:
        return self.kind


class _Record(NamedTuple):
    # the constructor that had the arguments; a subclass may have another one
    init: Callable[..., Any]
    config: Any
    names: frozenset[str]  # of the attributes at the end of the constructor


_records: dict[int, _Record] = {}  # by the ID of the object


def record_construction(built: object, init: Callable[..., Any], bound: Mapping[str, Any]) -> None:
    """Record the arguments, `self` included, with which an object's constructor was called, for
    `to_config`.

    They are converted now, so that arrays are not kept in memory.
    """
    if id(built) not in _records:
        try:
            weakref.finalize(built, _records.pop, id(built), None).atexit = False
        except TypeError:  # a class with slots
            return
    # The constructor of a subclass ends after that of the base class
    names = frozenset(getattr(built, "__dict__", ()))
    _records[id(built)] = _Record(init, _convert_arguments(built, init, bound), names)


def recorded(kind: type) -> None:
    """Have the constructor of a class record its arguments.

    For `__init_subclass__` of a class that users derive from.

    >>> class Scale:
    ...     def __init__(self, factor):
    ...         self.inverse = 1 / factor
    >>> recorded(Scale)
    >>> to_config(Scale(2))
    {'type': <class 'jengine.config.construction.Scale'>, 'factor': 2}
    """
    init = vars(kind).get("__init__")
    if not isinstance(init, types.FunctionType):
        return
    signature = inspect.signature(init)

    @functools.wraps(init)
    def call(*args: Any, **kwargs: Any) -> None:
        init(*args, **kwargs)
        record_construction(args[0], call, signature.bind(*args, **kwargs).arguments)

    kind.__init__ = call  # type: ignore[misc]


def to_config(value: Any) -> Any:
    """Return a value as a config has it: objects become `dict(type=..., **arguments)`, at every
    level.

    A value that cannot be described becomes `Unwritable`.

    >>> from jengine.model.losses import CrossEntropy
    >>> to_config({"loss": CrossEntropy(label="y"), "weights": np.ones(3000)})
    {'loss': {'type': <class 'jengine.model.losses.CrossEntropy'>, 'label': 'y'}, 'weights':
    ndarray}
    """
    kind = type(value)
    if is_small_array(value):
        return copy.copy(value)  # the user may write to it later
    if kind in _LITERALS or isinstance(value, os.PathLike | np.generic | np.dtype):
        return value
    if isinstance(value, type | types.FunctionType | types.BuiltinFunctionType):
        return value
    if isinstance(value, FieldReference):
        return to_config(value.get())
    if kind in (list, tuple):
        is_data = len(value) > _MAX_ITEMS
        return (
            Unwritable(f"{kind.__name__} of {len(value):,} items")
            if is_data
            else _join(kind(map(to_config, value)))
        )
    if isinstance(value, functools.partial):
        if value.args:
            return Unwritable(
                "functools.partial with positional arguments",
                "them by name, `partial(fn, name=value)`",
            )
        return {"type": value.func, **to_config(value.keywords)}
    record = _records.get(id(value))
    if record is not None and kind.__init__ is record.init:
        if (late := _find_late(value, record)) is not None:
            return Unwritable(
                f"{kind.__name__} with {late!r} set later",
                f"a subclass with the attribute {late!r}",
            )
        return {"type": kind, **record.config} if isinstance(record.config, dict) else record.config
    if dataclasses.is_dataclass(value) and kind.__dataclass_params__.init:
        return {"type": kind, **dict(_changed_fields(value))}
    if isinstance(value, Mapping | ConfigDict):
        return _join({key: to_config(item) for key, item in value.items()})
    if (
        callable(value)
        and hasattr(value, "__qualname__")
        and not isinstance(value, types.MethodType)
    ):
        return value  # a function of `jax.jit`
    return _convert_object(value)


def _join(values: Any) -> Any:
    """Return a list or dict of converted values.

    If it has nothing but data, as data: 'dict of ndarray'.
    """
    items = list(values.values() if isinstance(values, dict) else values)
    if items and all(isinstance(item, Unwritable) and not item.instead for item in items):
        return Unwritable(f"{type(values).__name__} of {items[0].kind}")
    return values


def is_small_array(value: Any) -> bool:
    """Return whether a value is an array of NumPy or JAX, with numbers, that is short enough for a
    config.

    >>> is_small_array(np.ones(3)), is_small_array(np.ones(3000))
    (True, False)
    """
    jax = sys.modules.get("jax")
    is_jax = (
        jax is not None and isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    )
    # a random key has another
    if not (is_jax or type(value) is np.ndarray) or not isinstance(value.dtype, np.dtype):
        return False
    if is_jax and (value.weak_type or not value.is_fully_addressable):
        return False
    return value.dtype.kind in "biuf" and 0 < value.size <= _MAX_ITEMS


def has_unwritable(config: Any) -> bool:
    """Return whether a result of `to_config` has a value that could not be described."""
    if isinstance(config, dict):
        return any(map(has_unwritable, config.values()))
    if isinstance(config, list | tuple):
        return any(map(has_unwritable, config))
    return isinstance(config, Unwritable)


def convert_call(function: Callable[..., Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call as a config, without those that have the default value."""
    parameters = inspect.signature(function).parameters
    return {
        name: to_config(value)
        for name, value in arguments.items()
        if value is not parameters[name].default
    }


def _find_late(value: Any, record: _Record) -> str | None:
    """Return a public attribute that was set from outside after the construction, if there is
    one.
    """
    late = (
        name
        for name in getattr(value, "__dict__", {})
        if name not in record.names and not name.startswith("_")
    )
    # not a cached property
    return next((name for name in late if not hasattr(type(value), name)), None)


def _convert_arguments(built: object, init: Callable[..., Any], bound: Mapping[str, Any]) -> Any:
    config: dict[str, Any] = {}
    # without `self`
    for name, parameter in itertools.islice(inspect.signature(init).parameters.items(), 1, None):
        if name not in bound:
            continue
        if parameter.kind is parameter.VAR_KEYWORD:
            config |= {key: to_config(value) for key, value in bound[name].items()}
        elif parameter.kind in (parameter.VAR_POSITIONAL, parameter.POSITIONAL_ONLY):
            return Unwritable(type(built).__name__)  # which a config cannot pass
        else:
            config[name] = to_config(bound[name])
    data = next(
        (
            item.kind
            for item in config.values()
            if isinstance(item, Unwritable) and not item.instead
        ),
        "",
    )
    return Unwritable(f"{type(built).__name__} with {data}") if data else config


def _changed_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield the fields of a dataclass object that differ from the defaults.

    Flax sets `parent` and `name` itself.
    """
    for field in dataclasses.fields(value):
        item = vars(value).get(field.name, field.default)
        if field.init and item is not field.default and field.name not in ("parent", "name"):
            yield field.name, to_config(item)


def _convert_object(value: Any) -> Any:
    kind = type(value)
    if kind.__name__.startswith("GradientTransformation"):
        return Unwritable(
            kind.__name__, "the function of optax with its arguments: `dict(type=optax.adam, ...)`"
        )
    if (nnx := sys.modules.get("flax.nnx")) is not None and isinstance(value, nnx.Module):
        return Unwritable(
            kind.__name__,
            f"the class, `NnxModel({kind.__name__}, ...)`, or a `functools.partial` of it",
        )
    try:
        names = list(inspect.signature(kind).parameters)
    except (TypeError, ValueError):  # a class in C
        return Unwritable(kind.__name__)
    # an iterator of Python's, a named tuple
    if not hasattr(value, "__dict__") or isinstance(value, tuple):
        return Unwritable(kind.__name__)
    has_init = kind.__init__ is not object.__init__
    # without a constructor, attributes were set from outside
    if not names and (has_init or not vars(value)):
        return {"type": kind}
    return Unwritable(
        kind.__name__,
        f"`dict(type={', '.join([kind.__name__, *(f'{name}=...' for name in names)])})`",
    )
