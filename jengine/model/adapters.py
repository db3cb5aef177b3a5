"""Helpers for the model adapters: build modules and losses from configs, and call functions
written by the user.
"""

import contextlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jengine.config.errors import config_path
from jengine.config.registry import MODELS, Registry, as_config, check_arguments, resolve_functions
from jengine.model.model import ArrayTree, Batch, Losses
from jengine.model.selection import Selector, select

# The entries of MODELS, with the names for errors
_LOSSES = Registry("loss", parent=MODELS)
_NETWORKS = Registry("network", parent=MODELS)


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
    """Return losses by name; anything but a dict becomes the entry 'loss'."""
    return dict(losses) if isinstance(losses, Mapping) else {"loss": losses}


# Usual names of the argument that selects training or inference, and its value in training.
_TRAIN_ARGUMENTS = {
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
        p.name: _TRAIN_ARGUMENTS[p.name] is train
        for p in parameters
        if p.name in _TRAIN_ARGUMENTS and p.kind in kinds
    }


@contextlib.contextmanager
def explain_static_modes(arguments: Iterable[str]) -> Iterator[None]:
    """Add to errors of the body what to write where a transformation of JAX traces the argument for
    the mode.

    The engine passes a Python bool. `jax.jit` and `jax.checkpoint` make an array of it unless it is
    static, and then `if train:` fails in the network, far from the line to change; a static
    argument in turn must not get an array.

    Args:
      arguments: the names of the arguments with which the body calls the network; those of modes
        are looked for.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        # JAX names the argument; within a transformation of Flax it only has its position,
        # `args[2]`
        found = re.search(
            r"shape bool\[\].*value of the argument (\w+)(\[\d+\])?", str(error), re.DOTALL
        )
        names = [
            name
            for name in arguments
            if name in _TRAIN_ARGUMENTS and found and (found[1] == name or found[2])
        ]
        if names and isinstance(error, jax.errors.TracerBoolConversionError):
            error.add_note(
                f"`{names[0]}` must be static where the network, or a part of it, is transformed: "
                f"write `jax.jit(f, static_argnames={names[0]!r})` or no jit at all, as the "
                "engine compiles the whole step; in Flax `nn.remat(Block, static_argnums=...)`, "
                "with the number of the argument."
            )
        elif "static arguments" in str(error) and "racer" in str(error):
            error.add_note(
                "A static argument of `jax.jit` must be a Python value, got one that depends on "
                "traced arrays: pass True or False for the mode (`train`, `deterministic`), or "
                "leave it out of `static_argnames` and select with `jnp.where` or `jax.lax.cond`."
            )
        raise
