"""Checks of arguments against a constructor's annotations: types, choices (`Literal`) and ranges
(`Range`).

The annotations are the config's schema: `interval: Annotated[int, Range(ge=1)]`. Libraries for this
are slow to import (pydantic, typeguard, beartype), or refuse annotations such as `Callable`,
protocols, and unions of classes (msgspec), which constructors here have throughout.
"""

import collections.abc
import dataclasses
import functools
import inspect
import itertools
import math
import numbers
import types
import typing
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple, TypeGuard, TypeVar

from jengine.config.duration import IsDuration
from jengine.config.errors import (
    ArgumentError,
    closest,
    config_path,
    current_config_path,
    did_you_mean,
)

T = TypeVar("T", bound=Callable[..., Any])
_UNIONS = (typing.Union, types.UnionType)


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
            (_is_finite(number) or number == self.le)
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


def _is_finite(number: Any) -> bool:
    try:
        return math.isfinite(number)
    except OverflowError:  # an integer that is too large for a float
        return False


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
        if isinstance(value, str) or is_mapping(value):
            self._registry.check(value, **self._supplied)


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
    """Value that does not fit: keys within the argument, annotation, and whether the type is
    wrong.
    """

    keys: tuple[str | int, ...]
    annotation: Any
    value: Any
    is_type: bool


def check_values(owner: str, entry: Callable[..., Any], arguments: Mapping[str, Any]) -> None:
    """Check arguments against the annotations of `entry`. A default always fits.

    Args:
      owner: replaces the path in messages outside a config: `CheckpointHook.interval`.
      entry: a class or function. An annotation that cannot be resolved is not checked; the others
        are.
      arguments: by name.

    Raises:
      TypeError: a value with another type. ArgumentError: a value out of range, or not one of the
        choices.
    """
    for name, parameter in parameters_of(entry).items():
        value = arguments.get(name, parameter.default)
        if value is parameter.default or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if (mismatch := _find_mismatch(parameter.annotation, value)) is not None:
            raise _error(owner, name, mismatch)
        _check_configs(parameter.annotation, name, value)


def checked(entry: T, owner: str | None = None) -> T:
    """Return `entry` such that each call checks the arguments.

    A class is changed in place, a function is wrapped.

    >>> @checked
    ... def wait(seconds: NonNegative): ...
    >>> wait(-1)
    Traceback (most recent call last):
    jengine.config.errors.ArgumentError: `wait.seconds` must be a number of at least 0, got -1

    Args:
      entry: a class or function.
      owner: for messages, see `check_values`; the name of `entry` by default.
    """
    owner = entry.__name__ if owner is None else owner
    if not isinstance(entry, type):
        return typing.cast(T, _checked(entry, owner))
    init = vars(entry).get("__init__")
    if isinstance(init, types.FunctionType):
        entry.__init__ = _checked(init, owner)  # type: ignore[misc]
    return entry


def checks_itself(entry: Callable[..., Any]) -> bool:
    """Return whether `entry` is a result of `checked`.

    A class that only inherits a checked constructor is not.
    """
    return (vars(entry).get("__init__") if isinstance(entry, type) else entry) in _wrapped


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
    if all(not isinstance(parameter.annotation, str) for parameter in parameters.values()):
        return parameters
    names = _global_names(entry)
    return {
        name: p.replace(annotation=_resolve(p.annotation, names)) for name, p in parameters.items()
    }


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


def _resolve(annotation: object, names: dict[str, Any]) -> Any:
    """Return the value for an annotation that is text.

    The text itself, which fits every value, if it has none.
    """
    try:
        return eval(annotation, names) if isinstance(annotation, str) else annotation
    except Exception:  # it may name what only type checkers import, or be any expression
        return annotation


_wrapped: weakref.WeakSet[Callable[..., Any]] = weakref.WeakSet()  # functions that check already


def _checked(function: Callable[..., Any], owner: str) -> Callable[..., Any]:
    if function in _wrapped:  # registered under several names
        return function
    signature = inspect.signature(function)

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs).arguments
        except TypeError:
            names = signature.parameters
            if unknown := [name for name in kwargs if name not in names]:
                kind = owner or function.__qualname__.partition(".")[0]
                known = [name for name in names if name != "self"]
                raise TypeError(
                    f"{kind} has no argument {unknown[0]!r}{closest(unknown[0], known)}"
                ) from None
            return function(*args, **kwargs)  # Python's own message for missing arguments
        check_values(owner, function, bound)
        result = function(*args, **kwargs)
        if function.__name__ == "__init__" and owner:
            from jengine.config.construction import record_construction  # imports NumPy
            from jengine.config.description import record_arguments

            record_arguments(args[0], bound)
            record_construction(args[0], call, bound)
        return result

    _wrapped.add(call)
    return call


def alternatives(annotation: object) -> Iterator[Any]:
    """Yield the types that fit an annotation: those of a union, without the limits of `Annotated`.

    >>> list(alternatives(Count | None))
    [<class 'int'>, <class 'NoneType'>]
    """
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        yield from alternatives(args[0])
    elif origin in _UNIONS:
        for kind in args:
            yield from alternatives(kind)
    else:
        yield annotation


def takes_functions(parameter: inspect.Parameter) -> bool:
    """Return whether a parameter takes functions or classes: by the annotation, or by the default
    if it is `Any`.

    >>> takes_functions(inspect.signature(lambda key=len, size=1: 0).parameters["key"])
    True
    """
    kinds = list(alternatives(parameter.annotation))
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


def _find_mismatch(annotation: object, value: Any) -> _Mismatch | None:
    """Return the first value, `value` itself or one within it, that does not fit its annotation."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Annotated:
        inner = _find_mismatch(args[0], value)
        if inner is not None:
            return inner if inner.keys else inner._replace(annotation=annotation)
        fits = all(value in bound for bound in _bounds(args))
        return None if fits else _Mismatch((), annotation, value, is_type=False)
    if origin in _UNIONS:
        return _find_in_union(annotation, args, value)
    if origin is Literal:
        if any(type(value) is type(choice) and value == choice for choice in args):
            return None
        return _Mismatch(
            (), annotation, value, is_type=all(type(value) is not type(choice) for choice in args)
        )
    if not _has_type(origin or annotation, value):
        return _Mismatch((), annotation, value, is_type=True)
    if origin is tuple and args[-1:] != (...,):
        if args and len(args) != len(value):
            return _Mismatch((), annotation, value, is_type=False)
        return _find_in_items(zip(range(len(value)), value, args, strict=False))
    if origin in (list, tuple, collections.abc.Sequence) and args:
        return _find_in_items((index, item, args[0]) for index, item in enumerate(value))
    if origin in (dict, collections.abc.Mapping, collections.abc.MutableMapping):
        found = (
            mismatch for key in value if (mismatch := _find_mismatch(args[0], key)) is not None
        )
        return next(found, None) or _find_in_items(
            (key, item, args[1]) for key, item in value.items()
        )
    return None


def _find_in_union(
    annotation: object, alternatives: Sequence[object], value: object
) -> _Mismatch | None:
    """Return the mismatch for a union: within the alternative that fits best, or for all."""
    mismatches = [
        mismatch for kind in alternatives if (mismatch := _find_mismatch(kind, value)) is not None
    ]
    if len(mismatches) < len(alternatives):
        return None
    deepest = max(mismatches, key=lambda mismatch: len(mismatch.keys))
    all_types = all(mismatch.is_type for mismatch in mismatches)
    return deepest if deepest.keys else _Mismatch((), annotation, value, is_type=all_types)


def _find_in_items(items: Iterable[tuple[str | int, object, object]]) -> _Mismatch | None:
    for key, item, annotation in items:
        if (mismatch := _find_mismatch(annotation, item)) is not None:
            return mismatch._replace(keys=(key, *mismatch.keys))
    return None


def _bounds(args: Sequence[Any]) -> list[Any]:
    return [mark for mark in args[1:] if isinstance(mark, Range | Ascending | IsDuration)]


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
    Any: lambda value: True,
    inspect.Parameter.empty: lambda value: True,
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


def _error(owner: str, name: str, mismatch: _Mismatch) -> Exception:
    path = ""
    with config_path(
        *([owner] if owner and not current_config_path() else []), name, *mismatch.keys
    ):
        path = current_config_path()
    annotation = mismatch.annotation
    value = mismatch.value
    choices = [choice for choice in _choices(annotation) if isinstance(choice, str)]
    # the choices are part of the message
    hint = did_you_mean(value, choices) if isinstance(value, str) else ""
    if isinstance(value, tuple) and len(value) == 1 and is_mapping(value[0]):
        hint = "; remove the comma after `dict(...)`"
    message = f"`{path}` must be {describe(annotation)}, got {value!r}{hint}"
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
        return " ".join([describe(args[0]), *map(str, _bounds(args))])
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


def _choices(annotation: object) -> list[Any]:
    """Return the choices in the annotation's `Literal`s."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    if origin is Literal:
        return list(args)
    nested = args if origin in (*_UNIONS, Annotated) else ()
    return [choice for alternative in nested for choice in _choices(alternative)]


def _check_configs(annotation: object, name: str | int, value: object) -> None:
    """Check the other objects' configs in an argument: itself, or the items in a sequence."""
    origin = typing.get_origin(annotation)
    args = typing.get_args(annotation)
    with config_path(name):
        for mark in args[1:] if origin is Annotated else ():
            if isinstance(mark, ConfigOf):
                mark.check(value)
        for alternative in args if origin in _UNIONS else (annotation,):
            if typing.get_origin(alternative) is collections.abc.Sequence and _is_sequence(value):
                for index, item in enumerate(value):
                    _check_configs(typing.get_args(alternative)[0], index, item)
