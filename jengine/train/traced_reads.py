"""Attributes that a hook's traced methods read, and those that have changed since."""

import contextlib
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np

_SCALARS = (bool, int, float, complex, str, bytes, type(None), np.generic)
_MAX_SIZE = 1000  # elements of a NumPy array that is copied to be compared


@contextlib.contextmanager
def record_reads(hook: Any, reads: dict[str, Any]) -> Iterator[None]:
    """Record the numbers, strings, arrays and tuples of them that are read from `hook` inside, which is being traced.

    Meanwhile its class is a subclass that records. Attributes that are also set inside are left out. An object whose
    class cannot change, such as one of a built-in type, is not recorded. `reads` receives the first values by name.

    >>> class Scale:
    ...     factor = 2.0
    >>> hook, reads = Scale(), {}
    >>> with record_reads(hook, reads):
    ...     _ = 3 * hook.factor
    >>> reads
    {'factor': 2.0}
    """
    cls: Any = type(hook)
    written: set[str] = set()

    def read(self: Any, name: str) -> Any:
        value = cls.__getattribute__(self, name)
        if not name.startswith("__") and _is_plain(value):
            # A copy, because the hook may write into its array
            reads.setdefault(name, np.array(value) if isinstance(value, np.ndarray) else value)
        return value

    def write(self: Any, name: str, value: Any) -> None:
        written.add(name)
        cls.__setattr__(self, name, value)

    names = dict(__slots__=(), __module__=cls.__module__, __qualname__=cls.__qualname__, __doc__=cls.__doc__)
    try:
        # Python looks `__getattribute__` up in the class, not in the instance
        recorder = type(cls)(cls.__name__, (cls,), {**names, "__getattribute__": read, "__setattr__": write})
        object.__setattr__(hook, "__class__", recorder)
    except TypeError:
        yield
        return
    try:
        yield
    finally:
        object.__setattr__(hook, "__class__", cls)
        for name in written:
            reads.pop(name, None)


def check_reads(hook: Any, reads: dict[str, Any]) -> None:
    """Raise RuntimeError if an attribute has changed since the trace, whose value the compiled step keeps."""
    for name, traced in reads.items():
        current = getattr(hook, name, None)
        if not _is_same(traced, current):
            raise RuntimeError(
                f"`{type(hook).__name__}.{name}` must not change during training, because the compiled step keeps the "
                f"value that its trace has read, {traced!r}; got {current!r}. Set runner.hyperparams[{name!r}], first "
                f"in before_train, and read ctx.hyperparams[{name!r}] in the traced method instead"
            )


def _is_plain(value: Any) -> bool:
    if isinstance(value, tuple):
        return all(map(_is_plain, value))
    if isinstance(value, np.ndarray):
        return value.size <= _MAX_SIZE
    return isinstance(value, _SCALARS) or (isinstance(value, jax.Array) and not isinstance(value, jax.core.Tracer))


def _is_same(traced: Any, current: Any) -> bool:
    if traced is current:
        return True
    if isinstance(traced, tuple) and isinstance(current, tuple):
        return len(traced) == len(current) and all(map(_is_same, traced, current))
    if isinstance(traced, np.ndarray) or isinstance(current, np.ndarray):
        return np.array_equal(traced, current, equal_nan=np.issubdtype(np.result_type(traced), np.inexact))
    if isinstance(traced, jax.Array) or isinstance(current, jax.Array):
        return False  # another array: its values are not fetched
    return bool(traced == current) or (traced != traced and current != current)  # NaN is not equal to itself
