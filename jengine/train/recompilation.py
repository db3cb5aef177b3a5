"""Count compiled programs, and report when a function that should compile once compiles again."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax

from jengine.errors import closest
from jengine.train.signature import Signature, abstract_signature, differences, sharding_signature

logger = logging.getLogger("jengine")
_MODES = ("warn", "raise")


class RecompilationError(TypeError):
    """Signal that arguments differ in structure, shape, dtype or placement from those of an earlier call."""


def check_on_recompile(mode: str | None) -> str:
    """Return the reaction to a recompilation: `mode`, or the environment's `JENGINE_ON_RECOMPILE` ('warn') for None.

    Raises:
      ValueError: neither 'warn' nor 'raise'.
    """
    chosen = os.environ.get("JENGINE_ON_RECOMPILE", "warn") if mode is None else mode
    if chosen not in _MODES:
        raise ValueError(f"on_recompile must be 'warn' or 'raise', got {chosen!r}{closest(str(chosen), _MODES)}")
    return chosen


class RecompilationGuard:
    """Wrap a function for `jax.jit` and report each call whose arguments compile it again.

    Each change is reported once, with the paths that changed: as a warning, after which the new signature is compiled
    too; or as an error, before it is compiled. The body of the wrapper runs only when JAX traces, so a call of the
    compiled function costs nothing more. A change of placement alone (sharding, devices) recompiles without a trace:
    the caller detects it with `compilation_counter` and calls `check_shardings`.

    Args:
      fn: the function to wrap.
      arguments: names of its positional arguments, for the message.
      name: name of the function, for the message.
      on_recompile: 'warn' or 'raise'; see `check_on_recompile`.

    Attributes:
      traces: number of times that the function was traced.
      shapes: the arguments as `jax.ShapeDtypeStruct`s, as `check_shardings` saw them last; None before.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Sequence[str],
        name: str = "the training step",
        on_recompile: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)
        self.traces = 0
        self.shapes: tuple[Any, ...] | None = None
        self._fn = fn
        self._arguments = tuple(arguments)
        self._name = name
        self._on_recompile = check_on_recompile(on_recompile)
        self._signatures: list[Signature] = []
        self._shardings: list[Signature] = []
        compilation_counter.install()

    def __call__(self, *args: Any) -> Any:
        """Call the function; under `jax.jit` this runs at each trace.

        Raises:
          RecompilationError: with `on_recompile='raise'`, an earlier call had arguments of another signature.
        """
        advice = "Keep the structure of batches: pad or drop a smaller last one, and keep keys and dtypes."
        self._compare(self._signatures, abstract_signature(args, self._arguments), advice)
        self.traces += 1
        return self._fn(*args)

    def check_shardings(self, *args: Any) -> None:
        """Record the argument placements of a call that compiled.

        Args:
          *args: the arguments of the call; donated arrays will do.

        Raises:
          RecompilationError: with `on_recompile='raise'`, an earlier call had them placed elsewhere.
        """
        self.shapes = jax.tree.map(_shape, args)
        shardings = sharding_signature(args, self._arguments)
        if self._shardings:  # added and removed entries are a change of signature, reported by the trace
            first = self._shardings[0]
            shardings = {path: shardings.get(path, sharding) for path, sharding in first.items()}
        self._compare(self._shardings, shardings, "Leave arrays where the strategy placed them.")

    def _compare(self, known: list[Signature], signature: Signature, advice: str) -> None:
        if signature in known:
            return
        if known and (changes := differences(known[0], signature)):
            text = "\n".join([f"{self._name} is compiled again, since its arguments changed:", *changes])
            if self._on_recompile == "raise":
                raise RecompilationError(f"{text}\n{advice}")
            logger.warning("%s\n%s `on_recompile='raise'` in train_cfg makes this an error.", text, advice)
        known.append(signature)


def _shape(leaf: Any) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False))


class CompilationCounter:
    """Count compiled programs, those found in the persistent cache included.

    Attributes:
      count: programs compiled since `install` was called first. Compare it before and after a call.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._installed = False

    def install(self) -> None:
        """Start counting; further calls do nothing."""
        if not self._installed:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            self._installed = True

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == self._EVENT


compilation_counter = CompilationCounter()
