"""Watches a function that is compiled for one form of its arguments: any other costs another compile, and is told."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jengine.errors import closest
from jengine.train.compiles import COMPILES
from jengine.train.forms import Form, differences, form_of, placement_of

logger = logging.getLogger("jengine")
_MODES = ("warn", "raise")


class RetraceError(TypeError):
    """A compiled function was called with arguments of another form than the first time."""


def check_retrace(mode: str | None) -> str:
    """What a change of form leads to: `mode`, or what `JENGINE_RETRACE` says where it is None, 'warn' by default.

    Raises:
      ValueError: neither 'warn' nor 'raise'.
    """
    chosen = os.environ.get("JENGINE_RETRACE", "warn") if mode is None else mode
    if chosen not in _MODES:
        raise ValueError(f"retrace is 'warn' or 'raise', found {chosen!r}{closest(str(chosen), _MODES)}")
    return chosen


class TraceOnce:
    """Wraps a function that is to be compiled, so that compiling it for a second form of its arguments is told.

    Each change is told once, with the paths that changed: as a warning, after which the new form is compiled too; or
    as an error, before it is. The watch costs nothing per call: the wrapper's body runs when JAX traces, and only then.
    A change of placement alone (sharding, devices) compiles again without a trace; whoever calls the compiled function
    knows of it from `COMPILES` and asks `look`.

    Args:
      fn: the function to watch.
      arguments: what its positional arguments are called in the message.
      name: what the function is called in the message.
      retrace: 'warn' or 'raise'; see `check_retrace`.

    Attributes:
      traces: how often it was traced.
      shapes: its arguments as `jax.ShapeDtypeStruct`s, as `look` saw them last; None before.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Sequence[str],
        name: str = "the training step",
        retrace: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.traces = 0
        self.shapes: tuple[Any, ...] | None = None
        self._fn = fn
        self._arguments = tuple(arguments)
        self._name = name
        self._retrace = check_retrace(retrace)
        self._forms: list[Form] = []
        self._placements: list[Form] = []
        COMPILES.listen()

    def __call__(self, *args: Any) -> Any:
        """Calls the function; compiled, this is where it is traced.

        Raises:
          RetraceError: with `retrace='raise'`, it was called before with arguments of another form.
        """
        advice = "Batches should keep their form: pad or drop a last one that is smaller, and keep keys and dtypes."
        self._compare(self._forms, form_of(args, self._arguments), advice)
        self.traces += 1
        return self._fn(*args)

    def look(self, *args: Any) -> None:
        """Takes note of where the arguments of a call lie that compiled something.

        Args:
          *args: of the call; donated ones will do.

        Raises:
          RetraceError: with `retrace='raise'`, they lay elsewhere before.
        """
        self.shapes = jax.tree.map(_shape, args)
        placement = placement_of(args, self._arguments)
        if self._placements:  # what came or went is a change of form
            first = self._placements[0]
            placement = {path: placement.get(path, place) for path, place in first.items()}
        self._compare(self._placements, placement, "Arrays should stay where the strategy placed them.")

    def _compare(self, known: list[Form], form: Form, advice: str) -> None:
        if form in known:
            return
        if known and (changes := differences(known[0], form)):
            text = "\n".join([f"{self._name} is compiled for one form of its arguments, and they changed:", *changes])
            if self._retrace == "raise":
                raise RetraceError(f"{text}\n{advice}")
            logger.warning(
                "%s\nIt is compiled once more, and both forms are kept. %s `retrace='raise'` in train_cfg makes this "
                "an error.",
                text,
                advice,
            )
        known.append(form)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))
