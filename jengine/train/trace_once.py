"""Holds a function to one trace: the second is refused, with what changed, before anything is compiled."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jengine.paths import dotted

Signature = dict[str, str]


class RetraceError(TypeError):
    """A compiled function was called with arguments of another form than the first time."""


class TraceOnce:
    """Wraps a function that is to be compiled, so that tracing it a second time raises.

    The check costs nothing per call: the wrapper's body runs when JAX traces, and only then.

    Args:
      fn: the function to hold.
      arguments: what its positional arguments are called in the message.
      name: what the function is called in the message.

    Attributes:
      traces: how often it was traced.
    """

    def __init__(self, fn: Callable[..., Any], arguments: Sequence[str], name: str = "the training step") -> None:
        functools.update_wrapper(self, fn)
        self.traces = 0
        self._fn = fn
        self._arguments = tuple(arguments)
        self._name = name
        self._first: Signature = {}

    def __call__(self, *args: Any) -> Any:
        """Calls the function.

        Raises:
          RetraceError: it was called before with arguments of another form; the message says what changed.
        """
        signature = _signature(args, self._arguments)
        if self._first and signature != self._first:
            raise RetraceError(_difference(self._first, signature, self._name))
        self._first.update(signature)
        self.traces += 1
        return self._fn(*args)


def _signature(args: Sequence[Any], names: Sequence[str]) -> Signature:
    """Shape, dtype and weak type of every leaf, by its path."""
    signature = {}
    for name, arg in zip(names, args, strict=True):
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]:
            aval = jax.typeof(leaf)
            weak = " (weakly typed)" if getattr(aval, "weak_type", False) else ""
            signature[f"{name}.{dotted(path)}" if path else name] = f"{aval.str_short()}{weak}"
    return signature


def _difference(first: Signature, now: Signature, name: str) -> str:
    """Says which leaves changed, at most five of them."""
    changes = [
        f"  {path}: was {first.get(path, 'absent')}, is {now.get(path, 'absent')}"
        for path in {**first, **now}
        if first.get(path) != now.get(path)
    ]
    shown = changes[:5] + ([f"  and {len(changes) - 5} more"] if len(changes) > 5 else [])
    return (
        f"{name} is compiled for one form of its arguments, and they changed:\n"
        + "\n".join(shown)
        + "\nBatches must keep their shapes: drop or pad the last one (`drop_last` of the data loader)."
    )
