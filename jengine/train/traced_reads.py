"""What hooks and models read while they are traced, and attributes that have changed since."""

import argparse
import contextlib
import dataclasses
import types
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import numpy as np

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_MAX_SIZE = 1000  # elements of a NumPy array that is copied to be compared
_MAX_ITEMS = 100  # of a list or dict, which is compared in each iteration; a longer one is data
_UNKNOWN = object()  # the copy of what is not compared, such as a function


class RecordedScalars(dict[str, Any]):
    """Hyperparameters by name that add the names that are read to a set.

    >>> names = set()
    >>> RecordedScalars({"lr": 0.5, "mixup": 0.2}, names)["mixup"], names
    (0.2, {'mixup'})
    """

    def __init__(self, values: Mapping[str, Any], names: set[str]) -> None:
        super().__init__(values)
        self._names = names

    def __getitem__(self, name: str) -> Any:
        self._names.add(name)
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return the value of a name, or the default."""
        return self[name] if name in self else default  # noqa: SIM401 - which is this method

    def __iter__(self) -> Iterator[str]:
        # defined here, because `{**self}` bypasses `__getitem__` otherwise
        return super().__iter__()

    def items(self) -> Any:
        """Return all pairs, which have been read then."""
        return {name: self[name] for name in self}.items()

    def values(self) -> Any:
        """Return all values, which have been read then."""
        return {name: self[name] for name in self}.values()


jax.tree_util.register_pytree_node(
    RecordedScalars,
    lambda scalars: ([scalars[name] for name in sorted(scalars)], tuple(sorted(scalars))),
    lambda names, values: RecordedScalars(dict(zip(names, values, strict=True)), set()),
)


@contextlib.contextmanager
def record_reads(
    owner: Any, reads: dict[str, Any], inputs: Mapping[str, Any] | None = None
) -> Iterator[None]:
    """Record the plain attributes that are read from `owner` inside, which is being traced.

    These are numbers, strings, arrays, and lists, dicts, dataclasses and namespaces with them.
    Meanwhile the class of `owner` is a subclass that records. Attributes that are also set or
    changed inside are left out. An object whose class cannot change, such as one of a built-in
    type, is not recorded. `reads` receives the first values by name. `inputs`, by attribute name,
    are returned in the place of the attributes, and not recorded.

    >>> class Scale:
    ...     factor = 2.0
    ...     offset = 1.0
    >>> scale, reads = Scale(), {}
    >>> with record_reads(scale, reads, {"offset": 5.0}):
    ...     scale.factor * 3 + scale.offset
    11.0
    >>> reads
    {'factor': 2.0}
    """
    cls: Any = type(owner)
    written: set[str] = set()
    inputs = {} if inputs is None else inputs

    def read(self: Any, name: str) -> Any:
        if name in inputs:
            return inputs[name]
        value = cls.__getattribute__(self, name)
        if not name.startswith("__") and (copied := _copy(value)) is not _UNKNOWN:
            reads.setdefault(name, copied)
        return value

    def write(self: Any, name: str, value: Any) -> None:
        written.add(name)
        cls.__setattr__(self, name, value)

    names = dict(
        __slots__=(), __module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__
    )
    try:
        # Python looks `__getattribute__` up in the class, not in the instance
        recorder = type(cls)(
            cls.__name__, (cls,), {**names, "__getattribute__": read, "__setattr__": write}
        )
        object.__setattr__(owner, "__class__", recorder)
    except Exception:  # of any type: a class may refuse to have subclasses
        yield
        return
    try:
        yield
    finally:
        object.__setattr__(owner, "__class__", cls)
        # the class may have registered its subclasses
        del recorder.__getattribute__, recorder.__setattr__
        # Lists may grow in a trace, as counters of traces do
        for name in written.union(list_changed(owner, reads)):
            reads.pop(name, None)


def check_reads(owner: Any, reads: Mapping[str, Any], instead: str) -> None:
    """Raise RuntimeError if an attribute has changed since the trace, whose value the compiled step
    keeps.

    `instead` says what to write for the attribute NAME.
    """
    for name in list_changed(owner, reads):
        raise RuntimeError(
            f"`{type(owner).__name__}.{name}` must not change during training, because the "
            f"compiled step keeps the value that its trace has read, {reads[name]!r}; got "
            f"{getattr(owner, name, None)!r}. {instead.replace('NAME', repr(name))}"
        )


def list_changed(owner: Any, reads: Mapping[str, Any]) -> list[str]:
    """Return the names of the attributes that have changed since `reads` received their values."""
    return [
        name for name, traced in reads.items() if not _is_same(traced, getattr(owner, name, None))
    ]


def _copy(value: Any) -> Any:
    """Return a copy to compare with, because the owner may write into its lists and arrays.

    Or `_UNKNOWN`.
    """
    if isinstance(value, _SCALARS) or (
        isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer)
    ):
        return value
    if isinstance(value, np.ndarray):
        return np.array(value) if value.size <= _MAX_SIZE else _UNKNOWN
    if (items := _list_items(value)) is None or len(items) > _MAX_ITEMS:
        return _UNKNOWN
    copied = {key: copy for key, item in items.items() if (copy := _copy(item)) is not _UNKNOWN}
    return _Items(copied, repr(value)) if copied else _UNKNOWN


class _Items(dict[Any, Any]):
    """Copies of the plain items of a list, dict, dataclass or namespace, which is printed as
    `text`.
    """

    def __init__(self, items: Mapping[Any, Any], text: str) -> None:
        super().__init__(items)
        self._text = text

    def __repr__(self) -> str:
        return self._text


def _list_items(value: Any) -> Mapping[Any, Any] | None:
    """Return the items of a container by index, key or field; None for any other object."""
    if isinstance(value, list | tuple):
        return dict(enumerate(value))
    if isinstance(value, dict):
        return value
    is_settings = dataclasses.is_dataclass(value) or isinstance(
        value, types.SimpleNamespace | argparse.Namespace
    )
    # A layer or a loss is an owner of its own, or one of a library's, which nobody changes
    return getattr(value, "__dict__", None) if is_settings and not callable(value) else None


def _is_same(traced: Any, current: Any) -> bool:
    if traced is current:
        return True
    if isinstance(traced, _Items):
        # An item that is added later, as in a cache, was not read
        items = _list_items(current)
        return items is not None and all(
            key in items and _is_same(item, items[key]) for key, item in traced.items()
        )
    if isinstance(traced, np.ndarray) or isinstance(current, np.ndarray):
        return np.array_equal(
            traced, current, equal_nan=np.issubdtype(np.result_type(traced), np.inexact)
        )
    if isinstance(traced, jax.Array) or isinstance(current, jax.Array):
        return False  # another array: its values are not fetched
    # NaN is not equal to itself
    return bool(traced == current) or (traced != traced and current != current)
