"""What the adapters share: building what a config names, and calling what a user wrote."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from jengine.model.model import Losses, PyTree
from jengine.registry import MODELS, check_arguments


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Whether `fn` has a parameter called `name`, or takes any keyword."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def select_inputs(batch: PyTree, inputs: str | tuple[str, ...] | None) -> tuple[Any, ...]:
    """The positional arguments of a module: the entries of `batch` called `inputs`, or the batch itself for None.

    Raises:
      KeyError: the batch has no such entry.
    """
    if inputs is None:
        return (batch,)
    names = (inputs,) if isinstance(inputs, str) else tuple(inputs)
    for name in names:
        if not isinstance(batch, Mapping) or name not in batch:
            found = sorted(batch) if isinstance(batch, Mapping) else type(batch).__name__
            raise KeyError(f"the model takes the batch entry {name!r} (its `inputs`), the batch has {found}")
    return tuple(batch[name] for name in names)


def build_loss(loss: Any) -> Callable[..., Any]:
    """A loss function from a registered config, or the function itself.

    Raises:
      TypeError: neither a config nor callable.
    """
    if hasattr(loss, "items"):
        loss = MODELS.build(loss)
    if not callable(loss):
        raise TypeError(f"a loss is a function (outputs, batch) -> losses or a config of one, found {loss!r}")
    return loss


def build_module(module: Any, **extra: Any) -> Any:
    """A network from a registered config with nested configs built inside out, or the module itself."""
    if not hasattr(module, "items"):
        return module
    arguments = {k: build_module(v) if hasattr(v, "items") and "type" in v else v for k, v in module.items()}
    kind = arguments.pop("type", None)
    if kind is None:
        raise TypeError(f"a module config needs a 'type', found the keys {sorted(arguments)}")
    entry = MODELS.get(kind) if isinstance(kind, str) else kind
    arguments.update(extra)
    check_arguments(entry, arguments)
    return entry(**arguments)


def call_loss(fn: Callable[..., Any], outputs: PyTree, batch: PyTree, hyperparams: Mapping[str, Any]) -> Losses:
    """Calls `fn(outputs, batch)`, with `hyperparams` too when it takes them; a bare array counts as 'loss'."""
    extra = {"hyperparams": hyperparams} if accepts(fn, "hyperparams") else {}
    return named(fn(outputs, batch, **extra))


def named(losses: Any) -> Losses:
    """Losses by name: what is no dict is the entry 'loss'."""
    return dict(losses) if isinstance(losses, Mapping) else {"loss": losses}
