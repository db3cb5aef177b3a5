"""Checks of arguments against a constructor's annotations: types, choices (`Literal`) and ranges
(`Range`).

The annotations are the config's schema: `interval: Annotated[int, Range(ge=1)]`. Libraries for this
are slow to import (pydantic, typeguard, beartype), or refuse annotations such as `Callable`,
protocols, and unions of classes (msgspec), which constructors here have throughout.
"""

import collections.abc
import dataclasses
import functools
import importlib
import inspect
import itertools
import math
import numbers
import sys
import types
import typing
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar

from jengine.config.duration import IsDuration
from jengine.config.errors import (
    ArgumentError,
    config_path,
    current_config_path,
)

T = TypeVar("T", bound=Callable[..., Any])
_UNIONS = (typing.Union, types.UnionType)
_ANYTHING = (Any, inspect.Parameter.empty)


@dataclasses.dataclass(frozen=True)
class Range:
    """Limits for a number: `Annotated[float, Range(ge=0, lt=1)]`.

    NaN is outside every range, and infinity unless it is `le`.

    >>> 0.5 in Range(ge=0, lt=1), 1 in Range(ge=0, lt=1)
    (True, False)

    Attributes:
      ge, gt, le, lt: the bounds, named after the comparisons; None for no bound.
    """

    ge: float | None = None
    gt: float | None = None
    le: float | None = None
    lt: float | None = None

    def __contains__(self, value: object) -> bool:
        if not isinstance(value, numbers.Real):  # an array on a device is not fetched
            return True
        number: Any = value
        return (
            (abs(number) < math.inf or number == self.le)
            and (self.ge is None or number >= self.ge)
            and (self.gt is None or number > self.gt)
            and (self.le is None or number <= self.le)
            and (self.lt is None or number < self.lt)
        )

    def __str__(self) -> str:
        low = self.ge if self.gt is None else self.gt
        high = self.le if self.lt is None else self.lt
        if low is None and high is None:
            return "that is finite"
        first, last = (
            str(bound) if isinstance(bound, int) else f"{bound or 0:g}" for bound in (low, high)
        )
        if high is None or high == math.inf:
            return f"of at least {first}" if self.gt is None else f"above {first}"
        if low is None:
            return f"of at most {last}" if self.lt is None else f"below {last}"
        return (
            f"in {'[' if self.gt is None else '('}{first}, {last}{']' if self.lt is None else ')'}"
        )


class Ascending:
    """Limit for a list of pairs: the first items increase.

    `Annotated[Sequence[tuple[int, int]], Ascending()]`.
    """

    def __contains__(self, pairs: Sequence[Sequence[float]]) -> bool:
        return all(first[0] < second[0] for first, second in itertools.pairwise(pairs))

    def __str__(self) -> str:
        return "in ascending order without duplicates"


class ConfigOf:
    """Mark for an argument that may be another object's config: `Annotated[Any,
    ConfigOf(DATASETS)]`.

    Args:
      registry: checks the config.
      *supplied: arguments that the owner passes besides those in the config.
    """

    # a `Registry`, whose module imports this one
    def __init__(self, registry: Any, *supplied: str) -> None:
        self._registry = registry
        self._supplied = dict.fromkeys(supplied)

    def check(self, value: object) -> None:
        """Check `value` if it is a config."""
        if isinstance(value, str) or hasattr(value, "items"):
            self._registry.check(value, **self._supplied)


_BOUNDS = (Range, Ascending, IsDuration)
# limits of integers as Python's ranges, which tell without a call of `__contains__` here
_COUNTS: dict[Any, Any] = {Range(ge=n): range(n, sys.maxsize) for n in (0, 1)}

# The annotations that most arguments have.
Count = Annotated[int, Range(ge=1)]
CountOrNever = Literal[-1] | Count  # MMEngine's -1 for "never", "none" or "all"
Index = Annotated[int, Range(ge=0)]  # counts from 0
Finite = Annotated[float, Range()]
NonNegative = Annotated[float, Range(ge=0)]
Positive = Annotated[float, Range(gt=0)]
Fraction = Annotated[float, Range(ge=0, le=1)]
Decay = Annotated[float, Range(ge=0, lt=1)]  # of a moving average
Duration = Annotated[str, IsDuration()]


class _Mismatch(NamedTuple):
    """Value that does not fit the annotation of its argument."""

    keys: tuple[str | int, ...]  # the argument, and those within it
    annotation: Any
    value: Any
    is_type: bool  # whether the type is wrong


def check_values(
    owner: str | None, entry: Callable[..., Any], arguments: Mapping[str, Any]
) -> None:
    """Check arguments against the annotations of `entry`. A default always fits.

    Args:
      owner: replaces the path in messages outside a config: `CheckpointHook.interval`. None for the
        name of `entry`.
      entry: a class or function. An annotation that cannot be resolved is not checked; the others
        are.
      arguments: by name.

    Raises:
      TypeError: a value with another type. ArgumentError: a value out of range, or not one of the
        choices.
    """
    checks = _checks_of(entry)
    for name, value in arguments.items():
        if name not in checks:
            continue
        default, annotation, fitting = check = checks[name]
        if value is default:
            continue
        if fitting is None:
            fitting = check[2] = _plain_types(annotation)
        limit = fitting.get(type(value), ())
        if limit is None or value in limit:
            continue
        if (mismatch := _find_mismatch(annotation, value, (name,))) is not None:
            raise _error(name_of(entry) if owner is None else owner, mismatch)


def name_of(entry: Callable[..., Any]) -> str:
    """Return the name of a class or function, that of the function for a `functools.partial`."""
    function = entry.func if isinstance(entry, functools.partial) else entry
    return getattr(function, "__name__", repr(function))


def checked(entry: T, owner: str | None = None) -> T:
    """Return `entry` such that each call checks the arguments.

    A class is changed in place, a function is wrapped. An object of such a class knows the
    arguments with which it was made, for `describe`; a subclass with a constructor of its own
    has to be `checked` too.

    >>> @checked
    ... def wait(seconds: NonNegative): ...
    >>> wait(-1)
    Traceback (most recent call last):
    jengine.config.errors.ArgumentError: `wait.seconds` must be a number of at least 0, got -1

    Args:
      entry: a class or function.
      owner: for messages, see `check_values`; by default the name of the class or function. With
        "" objects do not know their arguments.
    """
    owner = entry.__name__ if owner is None else owner
    if not isinstance(entry, type):
        return typing.cast(T, _checked(entry, owner))
    init = vars(entry).get("__init__")
    if isinstance(init, types.FunctionType):
        entry.__init__ = _checked(init, owner)  # type: ignore[misc]
    return entry


@functools.lru_cache(maxsize=1024)
def checks_itself(entry: Callable[..., Any]) -> bool:
    """Return whether calls of `entry` check the arguments, see `checked`."""
    called = getattr(entry, "__init__", None) if isinstance(entry, type) else entry
    return hasattr(called, "checks_arguments")


@functools.lru_cache(maxsize=1024)
def parameters_of(entry: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """Return the parameters of a class or function.

    Each annotation that is text is resolved if it can be. `**settings: Annotated[Any, Settings]`
    stands for the fields of the dataclass `Settings`.

    Raises:
      TypeError, ValueError: `entry` has no signature, as some built-ins.
    """
    parameters: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(entry).parameters.items():
        (settings,) = getattr(parameter.annotation, "__metadata__", (None,))[:1]
        if parameter.kind is parameter.VAR_KEYWORD and isinstance(settings, type):
            parameters.update(inspect.signature(settings).parameters)
        else:
            parameters[name] = parameter
    names = None
    for name, parameter in parameters.items():
        if isinstance(parameter.annotation, str):
            names = _global_names(entry) if names is None else names
            annotation = _resolve(parameter.annotation, names)
            parameters[name] = parameter.replace(annotation=annotation)
    return parameters


@functools.lru_cache(maxsize=1024)
def _checks_of(entry: Callable[..., Any]) -> Mapping[str, list[Any]]:
    """Return for each annotated parameter the default, the annotation, and a place for the
    `_plain_types`, which the first check fills in.
    """
    return {
        name: [p.default, p.annotation, None]
        for name, p in parameters_of(entry).items()
        if p.kind is not p.VAR_KEYWORD and p.annotation not in _ANYTHING
    }


def _plain_types(annotation: Any) -> Mapping[type, Any]:
    """Return types whose values fit, each with the limit of the values, or None.

    A value with another type, or outside of the limit, may fit nevertheless.
    """
    fitting: dict[type, Any] = {}
    is_union = typing.get_origin(annotation) in _UNIONS
    for kind in typing.get_args(annotation) if is_union else [annotation]:
        limit = None
        if typing.get_origin(kind) is Annotated:
            kind, limit, *others = typing.get_args(kind)
            if others or not isinstance(limit, _BOUNDS):
                continue
        origin = typing.get_origin(kind)
        if origin is Literal:
            choices = typing.get_args(kind)
            for choice in choices:
                fitting[type(choice)] = [c for c in choices if type(c) is type(choice)]
        elif isinstance(kind, type):
            fitting[kind] = _COUNTS.get(limit, limit) if kind is int else limit
            if kind is float:
                fitting[int] = limit
        elif origin is collections.abc.Sequence and typing.get_args(kind) == (Any,):
            fitting[list] = fitting[tuple] = None
        elif origin is collections.abc.Mapping and typing.get_args(kind) == (str, Any):
            fitting[dict] = _StringKeys()
    return fitting


class _StringKeys:
    """Limit for a dict: all keys are strings."""

    def __contains__(self, value: Mapping[Any, Any]) -> bool:
        return set(map(type, value)) <= {str}


def _global_names(entry: Callable[..., Any]) -> dict[str, Any]:
    """Return the names that annotations may use: those in the module that defines the class or
    function.
    """
    function: Any = entry.func if isinstance(entry, functools.partial) else entry
    # as `inspect.signature`: the first of the two that the classes define
    if isinstance(function, type):
        own = (
            vars(base).get(name) for base in function.__mro__ for name in ("__new__", "__init__")
        )
        function = next(
            (method for method in own if isinstance(method, types.FunctionType)), function
        )
    elif not inspect.isroutine(function):
        function = type(function).__call__
    return getattr(inspect.unwrap(function), "__globals__", {})


def _resolve(annotation: str, names: dict[str, Any]) -> Any:
    """Return the value for an annotation that is text.

    The text itself, which fits every value, if it has none.
    """
    try:
        return eval(annotation, names)
    except Exception:  # it may name what only type checkers import, or be any expression
        return annotation


@functools.cache
def _describer() -> Any:
    # it imports NumPy, which `jengine --help` does not wait for, and this module
    return importlib.import_module("jengine.config.description")


def _checked(function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    if hasattr(function, "checks_arguments"):  # registered under several names
        return function
    signature = inspect.signature(function)
    is_constructor = function.__name__ == "__init__"

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            return function(*args, **kwargs)  # Python's own message has the function's name
        if kwargs or len(args) > is_constructor:
            check_values(owner, function, bound)
        result = function(*args, **kwargs)
        if is_constructor and owner and type(args[0]).__init__ is call:  # not that of a base class
            _describer().stamp(args[0], function, bound)
        return result

    call.checks_arguments = True  # type: ignore[attr-defined]
    return call


def alternatives(annotation: object) -> list[Any]:
    """Return the types that fit an annotation: those of a union, without the limits of `Annotated`.

    >>> alternatives(Count | None)
    [<class 'int'>, <class 'NoneType'>]
    """
    kinds = []
    waiting = [annotation]
    while waiting:
        kind = waiting.pop(0)
        origin = typing.get_origin(kind)
        args = typing.get_args(kind)
        if origin is Annotated:
            waiting.insert(0, args[0])
        elif origin in _UNIONS:
            waiting[:0] = args
        else:
            kinds.append(kind)
    return kinds


def takes_functions(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter takes functions or classes: by the annotation, or by the default
    if it is `Any`.

    >>> takes_functions(inspect.signature(lambda key=len, size=1: 0).parameters["key"])
    True
    """
    kinds = alternatives(parameter.annotation)
    if any(map(_is_function_type, kinds)):
        return True
    return (
        callable(parameter.default)
        and parameter.default is not parameter.empty
        and any(kind in (Any, object, parameter.empty) for kind in kinds)
    )


def _is_function_type(kind: Any) -> bool:
    # as that of JAX's initializers
    is_protocol = getattr(kind, "_is_protocol", False) and "__call__" in vars(kind)
    return is_protocol or (typing.get_origin(kind) or kind) in (
        collections.abc.Callable,
        type,
        types.FunctionType,
    )


def _find_mismatch(annotation: object, value: Any, keys: tuple[str | int, ...]) -> _Mismatch | None:
    """Return the first value, `value` itself or one within it, that does not fit its annotation.

    Check the configs of other objects in it, too.
    """
    if annotation in _ANYTHING:
        return None
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        inner = None if args[0] is Any else _find_mismatch(args[0], value, keys)
        if inner is not None:
            return inner if inner.keys != keys else inner._replace(annotation=annotation)
        for mark in args[1:]:
            if isinstance(mark, ConfigOf):
                with config_path(*keys):
                    mark.check(value)
            elif isinstance(mark, _BOUNDS) and value not in mark:
                return _Mismatch(keys, annotation, value, is_type=False)
        return None
    if origin in _UNIONS:
        mismatches = []
        for alternative in args:
            mismatch = _find_mismatch(alternative, value, keys)
            if mismatch is None:
                return None
            mismatches.append(mismatch)
        # that of the alternative that fits best
        deepest = max(mismatches, key=lambda mismatch: len(mismatch.keys))
        all_types = all(mismatch.is_type for mismatch in mismatches)
        return deepest if deepest.keys != keys else _Mismatch(keys, annotation, value, all_types)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return None
        is_type = all(type(value) is not type(choice) for choice in args)
        return _Mismatch(keys, annotation, value, is_type)
    kind: Any = origin or annotation
    if type(value) is not kind and not _has_type(kind, value):
        return _Mismatch(keys, annotation, value, is_type=True)
    items: Iterable[tuple[Any, Any, Any]] = ()  # within the value: key, item and annotation
    if origin is tuple and args[-1:] != (...,):
        if args and len(args) != len(value):
            return _Mismatch(keys, annotation, value, is_type=False)
        items = zip(range(len(value)), value, args, strict=False)
    elif origin in (list, tuple, collections.abc.Sequence) and args:
        items = [(index, item, args[0]) for index, item in enumerate(value)]
    elif origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        for key in value:
            if (mismatch := _find_mismatch(args[0], key, keys)) is not None:
                return mismatch
        items = [(key, item, args[1]) for key, item in value.items()]
    for key, item, kind in items:
        if (mismatch := _find_mismatch(kind, item, (*keys, key))) is not None:
            return mismatch
    return None


def _is_sequence(value: object) -> TypeGuard[Sequence[Any]]:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def is_number(value: Any) -> bool:
    """Return whether a value is a real number, but not a bool: of Python or NumPy, or an array
    without axes.
    """
    if hasattr(value, "dtype"):
        kind = getattr(value.dtype, "kind", "")  # the dtype of a PRNG key has none
        return value.shape == () and kind in ("i", "u", "f", "V")  # V: bfloat16 and other ml_dtypes
    return is_host_number(value)


def is_host_number(value: object) -> TypeGuard[float]:
    """Return whether a value is a real number, but neither a bool nor an array, which may have to
    be fetched.

    >>> [is_host_number(value) for value in (1, 0.5, True, "1")]
    [True, True, False, False]
    """
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def is_mapping(value: object) -> TypeGuard[Mapping[str, Any]]:
    """Return whether a value is a dict or a config; a ConfigDict is not a Mapping."""
    return hasattr(value, "items")


# Types whose values are not just their instances.
_TESTS: dict[Any, Callable[[Any], bool]] = {
    None: lambda value: value is None,
    int: lambda value: isinstance(value, numbers.Integral) and not isinstance(value, bool),
    float: is_number,
    collections.abc.Sequence: _is_sequence,
    list: _is_sequence,
    tuple: _is_sequence,
    collections.abc.Callable: callable,
    collections.abc.Mapping: is_mapping,
    collections.abc.MutableMapping: is_mapping,
    dict: is_mapping,
}


def _has_type(kind: Any, value: object) -> bool:
    """Return whether `value` has the type `kind`.

    True for a `kind` that cannot be tested, such as a protocol.
    """
    try:
        test = _TESTS.get(kind)
        if test is not None:
            return test(value)
        return isinstance(value, kind) or (hasattr(kind, "items") and is_mapping(value))
    except TypeError:
        return True


def _error(owner: str, mismatch: _Mismatch) -> Exception:
    owners = [owner] if owner and not current_config_path() else []
    with config_path(*owners, *mismatch.keys):
        path = current_config_path()
    value = mismatch.value
    hint = ""
    if isinstance(value, tuple) and len(value) == 1 and is_mapping(value[0]):
        hint = "; remove the comma after `dict(...)`"
    message = f"`{path}` must be {describe(mismatch.annotation)}, got {value!r}{hint}"
    return TypeError(message) if mismatch.is_type else ArgumentError(message)


_NAMES: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "True or False",
    str: "a string",
    type(None): "None",
    None: "None",
    collections.abc.Callable: "a function",
    collections.abc.Sequence: "a list",
    list: "a list",
    tuple: "a list",
    collections.abc.Mapping: "a dict",
    collections.abc.MutableMapping: "a dict",
    dict: "a dict",
    type: "a class",
    Any: "anything",
    inspect.Parameter.empty: "anything",
}


def describe(annotation: object) -> str:
    """Return what fits an annotation, in words.

    >>> describe(Count | None)
    'an integer of at least 1 or None'
    """
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        bounds = [str(mark) for mark in args[1:] if isinstance(mark, _BOUNDS)]
        return " ".join([describe(args[0]), *bounds])
    if origin in _UNIONS:
        return " or ".join(dict.fromkeys(map(describe, args)))
    if origin is Literal:
        return " or ".join(map(repr, args))
    if origin is tuple and args[-1:] != (...,):
        return f"a list of {len(args)} items ({', '.join(map(describe, args))})"
    kind = origin or annotation
    if kind in _NAMES:
        return _NAMES[kind]
    name = kind.__name__ if isinstance(kind, type) else str(kind)
    return f"{'an' if name[0] in 'AEIOUaeiou' else 'a'} {name}"
