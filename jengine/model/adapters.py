"""Helpers for the model adapters: build modules and losses from configs, and call functions written by the user."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jengine.errors import config_path
from jengine.model.model import Losses, PyTree
from jengine.registry import MODELS, check_arguments
from jengine.selection import Selector, select


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Return whether `fn` has a parameter `name` or accepts any keyword argument."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())


def select_inputs(batch: PyTree, inputs: Selector | Sequence[Selector] | None) -> tuple[Any, ...]:
    """Return the positional arguments for a module: the batch entries in `inputs`, or the batch itself for None."""
    if inputs is None:
        return (batch,)
    selectors = (inputs,) if isinstance(inputs, int | str) else inputs
    return tuple(select(batch, selector, "inputs", "batch") for selector in selectors)


def build_loss(loss: Any) -> Callable[..., Any]:
    """Return the loss function for a config, or the function itself."""
    if hasattr(loss, "items"):
        loss = MODELS.build(loss)
    if not callable(loss):
        raise TypeError(f"`loss` must be a function (outputs, batch) -> losses or its config, got {loss!r}")
    return loss


def build_module(module: Any, **extra: Any) -> Any:
    """Build a network from its config, including nested configs; return anything but a config unchanged."""
    if not hasattr(module, "items"):
        return module
    arguments = dict(module)
    for name, value in module.items():
        if hasattr(value, "items") and "type" in value:
            with config_path(name):
                arguments[name] = build_module(value)
    entry = arguments.pop("type", None)
    if entry is None:
        raise TypeError(f"the config of a module must have a 'type', got only the keys {sorted(arguments)}")
    entry = MODELS.get(entry) if isinstance(entry, str) else entry
    if not callable(entry):
        raise TypeError(f"the `type` of a module must be a name or a class, got {entry!r}")
    check_arguments(entry, arguments | extra)
    return entry(**arguments | extra)


def call_loss(
    fn: Callable[..., Any],
    outputs: PyTree,
    batch: PyTree,
    hyperparams: Mapping[str, Any],
    sown: Mapping[str, Mapping[str, Any]] | None = None,
) -> Losses:
    """Return the losses by name from `fn(outputs, batch)`, with `hyperparams` and `sown` if it accepts them."""
    available = {"hyperparams": hyperparams, "sown": sown or {}}
    return to_loss_dict(fn(outputs, batch, **{name: x for name, x in available.items() if accepts(fn, name)}))


def to_loss_dict(losses: Any) -> Losses:
    """Return losses by name; anything but a dict becomes the entry 'loss'."""
    return dict(losses) if isinstance(losses, Mapping) else {"loss": losses}


# Usual names of the argument that selects training or inference, and its value in training.
_TRAIN_ARGUMENTS = {"train": True, "training": True, "is_training": True, "deterministic": False}


def train_arguments(module_type: type, *, train: bool) -> dict[str, bool]:
    """Return the arguments that select training or inference in a module's `__call__`."""
    parameters = inspect.signature(module_type.__call__).parameters
    return {name: value is train for name, value in _TRAIN_ARGUMENTS.items() if name in parameters}
