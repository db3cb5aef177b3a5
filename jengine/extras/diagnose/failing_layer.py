"""The layer in which a network failed, for errors whose message has only two shapes."""

import inspect
import re
import sys
import traceback
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

from jengine.config.errors import ConfigError, UnknownNameError
from jengine.extras.diagnose.locate import PLACE, locate_argument
from jengine.extras.diagnose.stacks import find_call
from jengine.model.model import Model
from jengine.model.selection import describe_array, describe_tree

_BATCH = "with the first batch of "
_LIBRARIES = ("flax", "equinox", "haiku")
_SPACE = {1: "length", 2: "height, width", 3: "depth, height, width"}


class _Found(NamedTuple):
    layer: Any  # the innermost one
    name: str  # its path and class
    inputs: dict[str, Any]  # the arrays with which it was called, by argument
    network: Any  # the outermost one


def describe_failing_layer(error: BaseException, context: Mapping[str, Any]) -> list[str]:
    """Return the layer or the function that failed in a first trace, or what its input must be,
    and the entries of the first batch.

    Explainer, for errors of the model or the loss. The examples in the context are the entries of
    batches with dtypes and shapes ('x f32[16,5], y i32[16]').
    """
    loader = context.get("loader")
    examples = context.get("examples", {})
    entries = context.get("host_entries", {}).get(loader)
    if entries and isinstance(error, UnknownNameError):
        listed = ", ".join(f"{path} ({kind})" for path, kind in entries.items())
        return [
            f"{loader} yields entries that stay on the host, because devices cannot store "
            f"strings, dates and objects: {listed}; give the model numbers, with arrays "
            "of equal shapes in all samples"
        ]
    # The message alone says enough, or the error has passed here with another batch
    known = (PLACE, _BATCH)
    is_clear = any(note.startswith(known) for note in getattr(error, "__notes__", ()))
    if loader not in examples or is_clear or isinstance(error, ConfigError | UnknownNameError):
        return []
    shown = [path for path in dict.fromkeys((loader, "train_dataloader")) if path in examples]
    batches = [f"{_BATCH}{path}: {examples[path]}" for path in shown]
    return [*_describe_failure(error, context.get("cfg"), examples[loader]), *batches]


def _describe_failure(error: BaseException, cfg: Any, example: str) -> list[str]:
    found = _find_layer(error)
    if found is None:
        return list(filter(None, [_describe_call(error)]))
    adapter = _find_adapter(error)
    setting = f"`{adapter}.module`" if adapter else "the network"
    message = _describe_wrong_input(error, found, setting, example)
    if message is None:
        listed = f": {describe_tree(found.inputs, 'call')}" if found.inputs else ""
        return [f"in the layer {found.name}{listed}"]
    notes = [message]
    if call := _find_call(error):
        frame, line = call
        notes.append(f"called in {frame.f_code.co_name} at {frame.f_code.co_filename}:{line}")
    if path := locate_argument(cfg, f"{adapter}.module"):
        notes.append(f"{PLACE}`{path}`")
    return notes


def _describe_wrong_input(
    error: BaseException, found: _Found, setting: str, example: str
) -> str | None:
    """Return the message about an input with too few axes or another number of features.

    None if both are right.

    `setting` is the argument with the network.
    """
    layer = found.layer
    array = next(iter(found.inputs.values()), None)
    # it has another layout
    if array is None or not array.shape or type(layer).__module__.startswith("equinox."):
        return None
    shown = describe_array(array)
    kernel = getattr(layer, "kernel_size", ())
    features = getattr(layer, "in_features", None)
    space = _SPACE.get(len(kernel)) if isinstance(kernel, tuple | list) else None
    # of Linen, whose layers are made for the first inputs
    if type(error).__name__ == "ScopeParamShapeError":
        expected = f"was made for samples of other shapes: {str(error).partition('. (http')[0]}"
    elif space and array.ndim < len(kernel) + 1:
        expected = f"takes [batch, {space}, channels]"
    elif isinstance(features, int) and array.shape[-1] != features:
        expected = f"has in_features={features}, not {array.shape[-1]}"
    else:
        return None
    names = re.findall(rf"(\S+) {re.escape(shown)}(?:,|$)", example)
    entry = f"the entry {names[0]!r}" if len(names) == 1 else "an input"  # of another layer
    network = type(found.network).__name__
    return (
        f"{setting} must be a network for the data, got {network}, whose layer {found.name} "
        f"{expected}, for {entry}, {shown}"
    )


def _find_layer(error: BaseException) -> _Found | None:
    """Return the innermost layer in a traceback, and the network that it is part of."""
    calls = []
    for frame, _ in traceback.walk_tb(error.__traceback__):
        bases = (
            (base.__name__, base.__module__.partition(".")[0])
            for base in type(frame.f_locals.get("self")).__mro__
        )
        if frame.f_code.co_name == "__call__" and any(
            n == "Module" and lib in _LIBRARIES for n, lib in bases
        ):
            calls.append(frame)
    if not calls:
        return None
    # The innermost one: outer modules only pass the input on.
    layer = calls[-1].f_locals["self"]
    network = calls[0].f_locals["self"]
    names = calls[-1].f_code.co_varnames[1 : calls[-1].f_code.co_argcount]
    values = {name: calls[-1].f_locals.get(name) for name in names}
    inputs = {name: value for name, value in values.items() if hasattr(value, "shape")}
    path = ".".join(_find_path(layer, network))
    kind = type(layer).__name__
    return _Found(layer, f"{path} ({kind})" if path else kind, inputs, network)


def _find_path(layer: Any, network: Any) -> tuple[str, ...]:
    if isinstance(path := getattr(layer, "path", None), tuple):  # of Linen
        return path
    nnx = sys.modules.get("flax.nnx")
    if nnx is None or not isinstance(network, nnx.Module):
        return ()
    return next(
        (tuple(map(str, path)) for path, module in nnx.iter_modules(network) if module is layer), ()
    )


def _find_adapter(error: BaseException) -> str | None:
    """Return the class of the model whose argument `module` is the network: 'LinenModel'."""
    for frame, _ in traceback.walk_tb(error.__traceback__):
        model = frame.f_locals.get("self")
        is_call = frame.f_code.co_name in ("init", "loss", "predict") and isinstance(model, Model)
        if is_call and "module" in inspect.signature(type(model)).parameters:
            return type(model).__name__
    return None


def _describe_call(error: BaseException) -> str | None:
    """Return the arrays with which the innermost function of the user was called.

    None without one.
    """
    if (call := _find_call(error)) is None:
        return None
    frame, _ = call
    code = frame.f_code
    names = code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]
    arguments = {name: frame.f_locals[name] for name in names if name in frame.f_locals}
    listed = [
        f"{name} {describe_array(value)}"
        if hasattr(value, "shape")
        else f"{name} ({describe_tree(value, 'dict').removeprefix('the dict has ')})"
        for name, value in arguments.items()
        if hasattr(value, "shape") or isinstance(value, dict)
    ]
    return f"{code.co_name} was called with {', '.join(listed)}" if listed else None


def _find_call(error: BaseException) -> tuple[types.FrameType, int] | None:
    calls = [*traceback.walk_tb(error.__traceback__)]
    return find_call(reversed(calls), lambda call: call[0].f_code.co_filename)
