"""Compilations: their number and cache, and whether a function compiles again."""

import functools
import logging
import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from jengine.config.errors import ConfigError
from jengine.config.explain import explain

logger = logging.getLogger("jengine")


class CompilationCounter:
    """Counter for compiled programs, including those loaded from the persistent cache.

    Attributes:
      count: programs compiled since the first call to `install`. Compare it before and after a
        call.
      cache_hits, cache_misses: of the persistent cache.
    """

    def __init__(self) -> None:
        self.count = 0
        self.cache_hits = 0
        self.cache_misses = 0
        self._installed = False

    def install(self) -> None:
        """Start counting; further calls do nothing."""
        if not self._installed:
            jax.monitoring.register_event_duration_secs_listener(self._on_event)
            jax.monitoring.register_event_listener(lambda event, **_: self._on_event(event))
            self._installed = True  # JAX cannot remove a single listener

    def _on_event(self, event: str, duration_secs: float = 0.0, **_: object) -> None:
        # JAX reports many kinds of events
        self.count += event == "/jax/core/compile/backend_compile_duration"
        self.cache_hits += event == "/jax/compilation_cache/cache_hits"
        self.cache_misses += event == "/jax/compilation_cache/cache_misses"


compilation_counter = CompilationCounter()


def use_compilation_cache() -> None:
    """Store compiled programs in the user's cache directory, unless JAX is configured otherwise.

    `JAX_COMPILATION_CACHE_DIR` selects another directory, `JAX_ENABLE_COMPILATION_CACHE=false`
    disables the cache.
    """
    compilation_counter.install()
    settings = jax.config.values
    # The user's choice holds, by environment or in code
    if settings["jax_compilation_cache_dir"] is None and settings["jax_enable_compilation_cache"]:
        root = os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache"
        jax.config.update("jax_compilation_cache_dir", str(pathlib.Path(root) / "jengine" / "jax"))
        # JAX's 1 s leaves out small programs
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.1)


class RecompilationError(TypeError):
    """Error for arguments that differ in structure, shape, dtype or sharding from an earlier
    call.
    """


class RecompilationGuard:
    """Function for `jax.jit` that reports each call whose arguments cause a recompilation.

    Each change is reported once: as a warning, after which the new arguments are compiled too; or
    as an error, before they are compiled. Explainers name the changed paths, and so does
    `JAX_EXPLAIN_CACHE_MISSES=1`. The wrapper runs only when JAX traces, so it adds no cost to
    compiled calls. A changed sharding alone recompiles without a trace, and is not reported.

    >>> guard = RecompilationGuard(lambda x: 2 * x, ["batch"], on_recompile="raise")
    >>> step = jax.jit(guard)
    >>> step(1.0).item(), step(2.0).item(), guard.traces
    (2.0, 4.0, 1)

    Args:
      fn: the function to wrap.
      arguments: names of the positional arguments, for explainers.
      name: function name, for messages.
      on_recompile: 'warn' or 'raise'; None for `$JENGINE_ON_RECOMPILE` or 'warn'.

    Attributes:
      traces: how often the function was traced.
      shapes: the last arguments of `record_shapes` as `jax.ShapeDtypeStruct`s; None before the
        first call.

    Raises:
      ConfigError: another mode.
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
        self.name = name
        self._fn = fn
        self._arguments = tuple(arguments)
        mode = on_recompile or os.environ.get("JENGINE_ON_RECOMPILE", "warn")
        if mode not in ("warn", "raise"):
            raise ConfigError(f"`on_recompile` must be 'warn' or 'raise', got {mode!r}")
        self._raises = mode == "raise"
        self._known: list[tuple[list[Any], Any]] = []  # shapes and structures of all traces
        self._expects_change = False
        compilation_counter.install()

    def __call__(self, *args: Any) -> Any:
        """Call the function; under `jax.jit` this runs at each trace.

        Raises:
          RecompilationError: with `on_recompile='raise'`, an earlier call had another signature.
        """
        shapes = jax.tree.map(_shape, args)
        signature = jax.tree.flatten(shapes)
        if signature not in self._known:  # else JAX has dropped a program
            if self._known:
                leaves, structure = self._known[0]
                self._report(jax.tree.unflatten(structure, leaves), shapes)
            self._known.append(signature)
        self.traces += 1
        return self._fn(*args)

    def expect_change(self) -> None:
        """Accept the next arguments that differ without a report."""
        self._expects_change = True

    def record_shapes(self, *args: Any) -> None:
        """Record the argument shapes of a call that compiled, or failed; they may be donated."""
        self.shapes = jax.tree.map(_placed_shape, args)

    def _report(self, known: Any, new: Any) -> None:
        is_expected = self._expects_change
        self._expects_change = False
        if is_expected:
            return
        error = RecompilationError(
            f"{self.name} is compiled again, because its arguments changed. Keep the structure and "
            "dtypes of batches: pad or drop a smaller last one, or pad each to the "
            "next of some fixed sizes (bucketing)."
        )
        explain(error, changed=(self._arguments, known, new))
        if self._raises:
            raise error
        hint = "`on_recompile='raise'` in train_cfg makes this an error."
        logger.warning("\n".join([f"{error} {hint}", *getattr(error, "__notes__", ())]))


def _shape(leaf: ArrayLike) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    weak_type = getattr(aval, "weak_type", False)
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak_type)


def _placed_shape(leaf: ArrayLike) -> jax.ShapeDtypeStruct:
    # an uncommitted array follows the others, so its current device would be wrong for another call
    if isinstance(leaf, jax.Array) and leaf.committed:
        return _shape(leaf).update(sharding=leaf.sharding)
    return _shape(leaf)
