"""Helpers for the model adapters: build modules and losses from configs, and call functions
written by the user.
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jengine.config.errors import config_path
from jengine.config.registry import MODELS, Registry, as_config, check_arguments, resolve_functions
from jengine.model.model import ArrayTree, Batch, Losses
from jengine.model.selection import Selector, select

# The entries of MODELS, with the names for errors
_LOSSES: Registry = Registry("loss", parent=MODELS)
_NETWORKS: Registry = Registry("network", parent=MODELS)


def accepts(fn: Callable[..., Any], name: str) -> bool:
    """Return whether `fn` has a parameter `name` or accepts any keyword argument."""
    try:
        parameters = inspect.signature(fn).parameters
    except (TypeError, ValueError):
        return False
    return name in parameters or any(
        p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()
    )


def select_inputs(
    batch: Batch, inputs: Selector | Sequence[Selector] | None, owner: str
) -> tuple[Any, ...]:
    """Return the positional arguments for a module: the batch entries in `inputs`, or the batch
    itself for None.

    `owner` is the class that has the argument `inputs`, for the error message.
    """
    if inputs is None:
        return (batch,)
    selectors = (inputs,) if isinstance(inputs, int | str) else inputs
    return tuple(select(batch, selector, f"{owner}.inputs", "batch") for selector in selectors)


def build_loss(loss: Any) -> Callable[..., Any]:
    """Return the loss function for a config, or the function itself."""
    with config_path("loss"):
        loss = _LOSSES.build_function(loss)
    if not callable(loss):
        raise TypeError(
            f"`loss` must be a function (outputs, batch) -> losses or its config, got {loss!r}"
        )
    return loss


def build_module(module: Any, **extra: Any) -> Any:
    """Build a network from its config, including nested configs.

    Return anything but a config unchanged.
    """
    module = as_config(module)
    if not hasattr(module, "items"):
        return module
    # A copy: a config is built several times, and must stay as it is.
    arguments = dict(module)
    # Inner modules first, as Linen modules are frozen dataclasses that take theirs as arguments.
    for name, value in module.items():
        if hasattr(value, "items") and "type" in value:
            with config_path(name):
                arguments[name] = build_module(value)
    entry = arguments.pop("type", None)
    if entry is None:
        raise TypeError(
            f"the config of a module must have a 'type', got only the keys {sorted(arguments)}"
        )
    entry = _NETWORKS.get(entry) if isinstance(entry, str) else entry
    if not callable(entry):
        raise TypeError(f"the `type` of a module must be a name or a class, got {entry!r}")
    arguments = resolve_functions(entry, arguments | extra)
    check_arguments(entry, arguments)
    return entry(**arguments)


def call_loss(
    fn: Callable[..., Any],
    outputs: ArrayTree,
    batch: Batch,
    hyperparams: Mapping[str, Any],
    sown: Mapping[str, Mapping[str, Any]] | None = None,
) -> Losses:
    """Return the losses by name from `fn(outputs, batch)`, with `hyperparams` and `sown` if it
    accepts them.
    """
    # By signature: most losses are functions of outputs and batch, and optax's take nothing else.
    available = {"hyperparams": hyperparams, "sown": sown or {}}
    return to_loss_dict(
        fn(outputs, batch, **{name: x for name, x in available.items() if accepts(fn, name)})
    )


def to_loss_dict(losses: Any) -> Losses:
    """Return losses by name: a dict or a NamedTuple; anything else becomes the entry 'loss'."""
    if isinstance(losses, tuple) and hasattr(losses, "_asdict"):  # no pair (sum, weight)
        losses = losses._asdict()
    return dict(losses) if isinstance(losses, Mapping) else {"loss": losses}


# Usual names of the argument that selects training or inference, and its value in training.
TRAIN_ARGUMENTS = {
    "train": True,
    "training": True,
    "is_train": True,
    "is_training": True,
    "deterministic": False,
}


def train_arguments(fn: Callable[..., Any], *, train: bool) -> dict[str, bool]:
    """Return the keyword arguments that select training or inference in a function, such as a
    module's `__call__`.

    >>> train_arguments(lambda x, *, is_train=False, deterministic=True: x, train=True)
    {'is_train': True, 'deterministic': False}
    """
    try:
        parameters = inspect.signature(fn).parameters.values()
    except ValueError:  # a builtin, such as `dict`
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return {
        p.name: TRAIN_ARGUMENTS[p.name] is train
        for p in parameters
        if p.name in TRAIN_ARGUMENTS and p.kind in kinds
    }
