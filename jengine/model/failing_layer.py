"""The layer in which a network failed, for errors whose message has only two shapes."""

import types
from collections.abc import Iterator
from typing import Any

from jengine.selection import describe_tree

_LIBRARIES = ("flax", "equinox", "haiku")


def describe_failing_layer(error: BaseException) -> str | None:
    """Return a sentence about the innermost layer in an error's traceback, with path and inputs; None without one."""
    found = None
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
    text = f"in the layer {name}" + (f": {describe_tree(inputs, 'call')}" if inputs else "")
    return text + _explain_axes(layer, list(inputs.values()))


def _frames(traceback: types.TracebackType | None) -> Iterator[types.FrameType]:
    while traceback is not None:
        yield traceback.tb_frame
        traceback = traceback.tb_next


def _explain_axes(layer: Any, inputs: list[Any]) -> str:
    """Return how many axes a convolution takes, if the input has fewer."""
    kernel = getattr(layer, "kernel_size", None)
    if not isinstance(kernel, tuple | list) or not inputs or len(inputs[0].shape) >= len(kernel) + 1:
        return ""
    return (
        f"; a kernel of size {tuple(kernel)} needs {len(kernel) + 2} axes: the batch, {len(kernel)} for space, channels"
    )
