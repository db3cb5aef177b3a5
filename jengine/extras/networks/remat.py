"""Activation checkpointing: intermediate results are computed again for the gradients."""

import fnmatch
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import numpy as np
from flax import linen as nn

from jengine.config import paths
from jengine.config.errors import ConfigError

if TYPE_CHECKING:
    from flax import nnx


def check_patterns(patterns: Sequence[str], modules: Iterable[str]) -> None:
    """Raise ConfigError for a pattern that matches none of the modules, given by dotted path."""
    names = [name for name in modules if name]
    for pattern in patterns:
        if not any(matches(name, [pattern]) for name in names):
            raise ConfigError(
                "`activation_checkpointing` must be paths of modules, such as 'layers_*', got "
                f"{pattern!r}, which matches none{paths.closest_paths(pattern, names)}"
            )


def matches(path: str, patterns: Sequence[str]) -> bool:
    """Return whether a module is meant by a pattern: its dotted path, or that in PyTorch, with
    wildcards.

    >>> matches("backbone.layers_3", ["backbone.layers.*"])
    True
    """
    names = (path, paths.torch_alias(f"{path}.").removesuffix("."))
    return any(fnmatch.fnmatchcase(name, pattern) for name in names for pattern in patterns)


def remat_linen(patterns: Sequence[str]) -> Any:
    """Return a context in which Linen modules that match are called under `nn.remat`.

    >>> with remat_linen(["Dense_0"]):
    ...     pass
    """
    # modules within whose remat this is: their second call is the actual one
    active: set[str] = set()

    def call(
        next_fun: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        ctx: nn.module.InterceptorContext,
    ) -> Any:
        path = ".".join(ctx.module.path)
        if ctx.method_name != "__call__" or path in active or not matches(path, patterns):
            return next_fun(*args, **kwargs)
        bound = _BoundArguments(args, kwargs)

        def run(module: nn.Module, arrays: Any) -> Any:
            active.add(path)
            try:
                return bound.call(module, arrays)
            finally:
                active.discard(path)

        return nn.remat(run)(ctx.module, bound.arrays)

    return nn.intercept_methods(call)


def remat_nnx(module: "nnx.Module", patterns: Sequence[str]) -> None:
    """Make NNX modules that match compute under `nnx.remat`.

    `module` is a copy, which this changes.
    """
    from flax import nnx

    for path, node in list(nnx.iter_modules(module)):
        if matches(".".join(map(str, path)), patterns):
            _replace_call(node)


def _replace_call(node: "nnx.Module") -> None:
    from flax import nnx

    kind: Any = type(node)

    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        bound = _BoundArguments(args, kwargs)
        return nnx.remat(lambda module, arrays: bound.call(kind.__call__, arrays, module))(
            self, bound.arrays
        )

    # Calls look up the class, so an attribute of the instance would not do.
    node.__class__ = type(kind.__name__, (kind,), {"__call__": call, "__module__": kind.__module__})


class _BoundArguments:
    """Arguments of a call.

    Only those with arrays are traced by a transformation, flags stay Python values.
    """

    def __init__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._args = args
        self._kwargs = dict(kwargs)
        positions = [i for i, value in enumerate(args) if _has_arrays(value)]
        self.arrays = {
            "args": {str(i): args[i] for i in positions},
            "kwargs": {name: value for name, value in kwargs.items() if _has_arrays(value)},
        }

    def call(self, function: Callable[..., Any], arrays: Any, *first: Any) -> Any:
        """Call a function with the arguments, of which those with arrays are replaced."""
        args = [arrays["args"].get(str(i), value) for i, value in enumerate(self._args)]
        return function(*first, *args, **{**self._kwargs, **arrays["kwargs"]})


def _has_arrays(value: Any) -> bool:
    return any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value))
