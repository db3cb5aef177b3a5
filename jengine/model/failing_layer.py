"""The layer in which a network failed, for errors whose message has only two shapes."""

import itertools
import sys
import types
from collections.abc import Iterator
from typing import Any

from jengine.selection import describe_array, describe_tree

_LIBRARIES = ("flax", "equinox", "haiku")
_ENGINE = (*_LIBRARIES, "jax", "jaxlib", "jengine", "optax", "chex", "numpy")


def explain_failing_layer(error: Exception) -> Exception:
    """Return the error with a note on the layer or the function that failed, or a clear error about too few axes."""
    found = _find_layer(error)
    if found is None:
        if (call := _describe_call(error)) is not None:
            error.add_note(call)
        return error
    name, inputs, axes = found
    if axes is None:
        error.add_note(f"in the layer {name}" + (f": {describe_tree(inputs, 'call')}" if inputs else ""))
        return error
    # A new error instead of a note, as the library's own text speaks of a kernel that the user has never seen; its
    # traceback stays.
    clear = ValueError(
        f"the layer {name} must have an input of {axes + 2} axes, the batch, {axes} for space, channels, got "
        f"{', '.join(map(describe_array, inputs.values()))}; give it samples of {axes + 1} axes"
        f"{', such as height, width, channels,' if axes == 2 else ''} in the dataset, or use another network in "
        "`model.module`"
    )
    clear.__notes__ = getattr(error, "__notes__", [])
    return clear.with_traceback(error.__traceback__)


def _find_layer(error: BaseException) -> tuple[str, dict[str, Any], int | None] | None:
    """Return the name and inputs of the innermost layer in a traceback, and the axes for space if inputs lack one."""
    found = None
    # The innermost one: outer modules only pass the input on.
    for frame in _frames(error.__traceback__):
        layer = frame.f_locals.get("self")
        bases = ((base.__name__, base.__module__.partition(".")[0]) for base in type(layer).__mro__)
        if frame.f_code.co_name == "__call__" and any(n == "Module" and lib in _LIBRARIES for n, lib in bases):
            found = layer, frame
    if found is None:
        return None
    layer, frame = found
    kind, path = type(layer).__name__, getattr(layer, "path", ())
    name = f"{'.'.join(path)} ({kind})" if isinstance(path, tuple) and path else kind
    names = frame.f_code.co_varnames[1 : frame.f_code.co_argcount]
    inputs = {key: frame.f_locals[key] for key in names if hasattr(frame.f_locals.get(key), "shape")}
    kernel = getattr(layer, "kernel_size", None)
    lacks_axes = isinstance(kernel, tuple | list) and inputs and next(iter(inputs.values())).ndim < len(kernel) + 1
    return name, inputs, len(kernel) if kernel and lacks_axes else None


def _describe_call(error: BaseException) -> str | None:
    """Return the arrays with which the innermost function of the user was called; None without one."""
    # Frames before the first of a library are those of the script that starts the run
    inner = itertools.dropwhile(lambda frame: not _is_library(frame), _frames(error.__traceback__))
    own = [frame for frame in inner if not _is_library(frame)]
    if not own:
        return None
    code = own[-1].f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: own[-1].f_locals[name] for name in names if name in own[-1].f_locals}
    listed = [
        f"{name} {describe_array(value)}"
        if hasattr(value, "shape")
        else f"{name} ({describe_tree(value, 'dict').removeprefix('the dict has ')})"
        for name, value in arguments.items()
        if hasattr(value, "shape") or isinstance(value, dict)
    ]
    return f"{code.co_name} was called with {', '.join(listed)}" if listed else None


def _is_library(frame: types.FrameType) -> bool:
    name = frame.f_globals.get("__name__", "").partition(".")[0]
    return name in _ENGINE or name in sys.stdlib_module_names


def _frames(traceback: types.TracebackType | None) -> Iterator[types.FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next
