"""Tracers that the user's code keeps after a trace, with what keeps them.

JAX's own search, `jax.checking_leaks`, traces all functions again at each call, and lists what
refers to a tracer over many steps: with a whole step that takes minutes.
"""

import contextlib
import gc
import types
from collections.abc import Iterator
from typing import Any

import jax

from jengine.config.frames import is_library
from jengine.extras.diagnose.first_failure import find_line

_DEPTH = 4  # containers around a tracer
_CONTAINERS = list | tuple | set | dict


class LeakedTracerError(Exception):
    """Error for a tracer that is kept after its trace."""


@contextlib.contextmanager
def checked_leaks() -> Iterator[None]:
    """Raise `LeakedTracerError` if what is traced in the body is kept by the user's code."""
    before = {id(tracer) for tracer in _list_tracers()}
    yield
    for tracer in _list_tracers():
        if id(tracer) not in before and (holder := _find_holder(tracer)):
            line = _find_line(tracer)
            raise LeakedTracerError(
                f"{holder} keeps a value of the trace, {tracer.aval}"
                f"{f', made at {line}' if line else ''}: outside of the step it is no array. "
                "Return it, for instance among the losses, or use `jax.debug.callback`"
            )


def _list_tracers() -> list[Any]:
    gc.collect()
    return [each for each in gc.get_objects() if isinstance(each, jax.core.Tracer)]


def _find_holder(value: Any, depth: int = _DEPTH) -> str:
    """Return the variable or the attribute that keeps a value, perhaps in containers; '' if none
    of the user does.
    """
    for holder in gc.get_referrers(value):
        found = ""
        if isinstance(holder, dict) and "__name__" in holder:  # of a module
            name = next((name for name, each in holder.items() if each is value), "")
            file = holder.get("__file__") or ""
            found = f"`{name}` of {file or holder['__name__']}" if not is_library(file) else ""
        elif isinstance(holder, types.CellType):
            found = _name_cell(holder)
        elif isinstance(holder, _CONTAINERS):
            found = _find_holder(holder, depth - 1) if depth else ""
        elif not isinstance(holder, types.FrameType | jax.core.Tracer):
            found = _name_attribute(holder, value)
        if found:
            return found
    return ""


def _name_cell(cell: Any) -> str:
    """Return the name of a variable that functions of the user share."""
    closures = [each for each in gc.get_referrers(cell) if isinstance(each, tuple)]
    for closure in closures:
        for function in gc.get_referrers(closure):
            if isinstance(function, types.FunctionType) and closure is function.__closure__:
                code = function.__code__
                if not is_library(code.co_filename):
                    name = code.co_freevars[list(closure).index(cell)]
                    return f"`{name}` of {function.__qualname__} in {code.co_filename}"
    return ""


def _name_attribute(owner: Any, value: Any) -> str:
    kind = type(owner)
    attributes = getattr(owner, "__dict__", None) or {}
    library = ("jax", "jaxlib", "flax", "builtins", "optax", "jengine")
    name = next((name for name, each in attributes.items() if each is value), "")
    is_own = kind.__module__.partition(".")[0] not in library
    return f"`{kind.__name__}.{name}`" if name and is_own else ""


def _find_line(tracer: Any) -> str:
    """Return the user's line that made a value."""
    while hasattr(tracer, "primal"):
        tracer = tracer.primal
    raw = getattr(getattr(tracer, "_line_info", None), "traceback", None)
    if raw is None:
        return ""
    return find_line(Exception().with_traceback(raw.as_python_traceback()))
