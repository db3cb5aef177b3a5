"""Recompilations: how many programs were compiled, and whether a function compiles again."""

import functools
import logging
import os
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from jengine.config.errors import closest
from jengine.config.explain import explain

logger = logging.getLogger("jengine")
PyTree = Any
_Placed = dict[tuple[Any, ...], jax.ShapeDtypeStruct]  # by path

_MODES = ("warn", "raise")


class CompilationCounter:
    """Counter for compiled programs, including those loaded from the persistent cache.

    Attributes:
      count: programs compiled since the first call to `install`. Compare it before and after a
        call.
    """

    _EVENT = "/jax/core/compile/backend_compile_duration"

    def __init__(self) -> None:
        self.count = 0
        self._installed = False

    def install(self) -> None:
        """Start counting; further calls do nothing."""
        if not self._installed:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            self._installed = True  # JAX cannot remove a single listener

    def _on_event(self, event: str, duration_secs: float, **_: object) -> None:
        self.count += event == self._EVENT  # JAX reports many kinds of events


compilation_counter = CompilationCounter()


class RecompilationError(TypeError):
    """Error for arguments that differ in structure, shape, dtype or sharding from an earlier
    call.
    """


def check_on_recompile(mode: str | None) -> str:
    """Return `mode`, for None `$JENGINE_ON_RECOMPILE` or 'warn'.

    Raise ValueError for another mode.
    """
    checked = os.environ.get("JENGINE_ON_RECOMPILE", "warn") if mode is None else mode
    if checked not in _MODES:
        raise ValueError(
            "on_recompile must be 'warn' or 'raise', got "
            f"{checked!r}{closest(str(checked), _MODES)}"
        )
    return checked


class RecompilationGuard:
    """Function for `jax.jit` that reports each call whose arguments cause a recompilation.

    Each change is reported once: as a warning, after which the new arguments are compiled too; or
    as an error, before they are compiled. Explainers name the changed paths. The wrapper runs only
    when JAX traces, so it adds no cost to compiled calls. A changed sharding alone will recompile
    without a trace: callers detect it with `compilation_counter`, and call `check_shardings`.

    >>> guard = RecompilationGuard(lambda x: 2 * x, ["batch"], on_recompile="raise")
    >>> step = jax.jit(guard)
    >>> step(1.0).item(), step(2.0).item(), guard.traces
    (2.0, 4.0, 1)

    Args:
      fn: the function to wrap.
      arguments: names of the positional arguments, for explainers.
      name: function name, for messages.
      on_recompile: 'warn' or 'raise'; see `check_on_recompile`.

    Attributes:
      traces: how often the function was traced.
      shapes: the last arguments of `record_shapes` as `jax.ShapeDtypeStruct`s; None before the
        first call.
    """

    def __init__(
        self,
        fn: Callable[..., Any],
        arguments: Sequence[str],
        name: str = "the training step",
        on_recompile: str | None = None,
    ) -> None:
        functools.update_wrapper(self, fn)  # `jax.jit` reads name and signature
        self.traces = 0
        self.shapes: tuple[Any, ...] | None = None
        self._fn = fn
        self._arguments = tuple(arguments)
        self.name = name
        self._on_recompile = check_on_recompile(on_recompile)
        self._signatures: list[tuple[tuple[str, ...], Any]] = []
        self._placed: list[_Placed] = []
        self._expects_change = False
        compilation_counter.install()

    def __call__(self, *args: Any) -> Any:
        """Call the function; under `jax.jit` this runs at each trace.

        Raises:
          RecompilationError: with `on_recompile='raise'`, an earlier call had another signature.
        """
        advice = (
            "Keep the structure of batches: pad or drop a smaller last one, and keep keys and "
            "dtypes. Batches of many "
            "sizes need few of them: pad each to the next of some fixed sizes (bucketing)."
        )
        leaves, structure = jax.tree.flatten(args)
        signature = tuple(map(_describe, leaves)), structure
        if signature not in self._signatures:
            self._report(self._signatures, signature, advice)
        self.traces += 1
        return self._fn(*args)

    def expect_change(self) -> None:
        """Accept the next arguments that differ without a report."""
        self._expects_change = True

    def record_shapes(self, *args: Any) -> None:
        """Record a call's argument shapes; the call may have failed."""
        self.shapes = jax.tree.map(_shape, args)

    def check_shardings(self, *args: Any) -> None:
        """Record the argument shardings of a call that compiled; donated arrays are allowed.

        Raises:
          RecompilationError: with `on_recompile='raise'`, an earlier call had other shardings.
        """
        self.record_shapes(*args)
        placed = dict(jax.tree_util.tree_flatten_with_path(self.shapes)[0])
        # JAX has a program for known ones, even if the last call had others
        if not any(_have_equal_shardings(placed, known) for known in self._placed):
            advice = "Keep the shardings of arrays that the strategy has set."
            self._report(self._placed, placed, advice)

    def _report(self, known: list[Any], new: Any, advice: str) -> None:
        is_expected = self._expects_change
        self._expects_change = False
        if known and not is_expected:
            error = RecompilationError(
                f"{self.name} is compiled again, because its arguments changed. {advice}"
            )
            explain(error, changed=(self._arguments, known[0], new))
            if self._on_recompile == "raise":
                raise error
            hint = "`on_recompile='raise'` in train_cfg makes this an error."
            logger.warning("\n".join([f"{error} {hint}", *getattr(error, "__notes__", ())]))
        known.append(new)


def _shape(leaf: ArrayLike) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    # an uncommitted array follows the others, so its current device would be wrong for another call
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


def _describe(leaf: ArrayLike) -> str:
    aval = jax.typeof(leaf)
    return f"{aval.str_short()}{' (weakly typed)' if getattr(aval, 'weak_type', False) else ''}"


def _have_equal_shardings(first: _Placed, second: _Placed) -> bool:
    # the trace has already reported added and removed entries
    pairs = [(leaf, second[path]) for path, leaf in first.items() if path in second]
    return all(
        a.sharding is b.sharding
        or (
            None not in (a.sharding, b.sharding)
            and a.sharding.is_equivalent_to(b.sharding, len(a.shape))
        )
        for a, b in pairs
    )
