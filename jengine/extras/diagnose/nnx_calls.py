"""Calls of NNX modules, each through a function of one's own while a program is traced."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

Call = Callable[..., Any]


@contextlib.contextmanager
def wrapped_calls(wrap: Callable[[Call], Call]) -> Iterator[None]:
    """Replace the `__call__` of all NNX modules by `wrap` of it, within the body.

    Python looks up a call in the class, so nothing else sees them all. A class that calls its base
    class passes `wrap` twice.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    classes = set() if nnx is None else _subclasses(nnx.Module)
    originals = {cls: vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)}
    try:
        for cls, call in originals.items():
            cls.__call__ = wrap(call)
        yield
    finally:
        for cls, call in originals.items():
            cls.__call__ = call


def _subclasses(cls: type) -> set[Any]:
    direct: list[Any] = cls.__subclasses__()
    return {*direct, *(each for sub in direct for each in _subclasses(sub))}
