"""Calls of NNX modules, each through a function of one's own while a program is traced."""

import contextlib
import functools
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

# (module, its path in the network, its call without arguments) -> what the call returns
Act = Callable[[Any, str, "functools.partial[Any]"], Any]
_PATH = "_path_in_network"


@contextlib.contextmanager
def wrapped_calls(act: Act) -> Iterator[None]:
    """Let `act` make the calls of all NNX modules, within the body and in this thread.

    Python looks up a call in the class, so nothing else sees them all. The module that is called
    first is the network.
    """
    nnx: Any = sys.modules.get("flax.nnx")
    classes = set() if nnx is None else _subclasses(nnx.Module)
    originals = {cls: vars(cls)["__call__"] for cls in classes if "__call__" in vars(cls)}
    thread = threading.get_ident()
    active: set[int] = set()

    def wrap(call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def run(self: Any, *args: Any, **kwargs: Any) -> Any:
            # in the second case it is the call of a base class, by the class itself
            if threading.get_ident() != thread or id(self) in active:
                return call(self, *args, **kwargs)
            if _PATH not in vars(self):
                # before transformations split the network: a string is part of the structure
                for path, module in nnx.iter_modules(self):
                    vars(module)[_PATH] = ".".join(map(str, path))
            active.add(id(self))
            try:
                return act(self, vars(self)[_PATH], functools.partial(call, self, *args, **kwargs))
            finally:
                active.discard(id(self))

        return run

    try:
        for cls, call in originals.items():
            cls.__call__ = wrap(call)
        yield
    finally:
        for cls, call in originals.items():
            cls.__call__ = call


def path_of(module: Any) -> str:
    """Return the path of an NNX module that has been called in `wrapped_calls`; '' for others."""
    path: str = vars(module).get(_PATH, "")
    return path


def _subclasses(cls: type) -> set[Any]:
    direct: list[Any] = cls.__subclasses__()
    return {*direct, *(each for sub in direct for each in _subclasses(sub))}
