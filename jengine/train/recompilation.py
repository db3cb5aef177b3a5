"""Recompilations: how many programs were compiled, and why a function that should compile once
compiles again.
"""

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.typing import ArrayLike

from jengine.config.errors import closest
from jengine.config.paths import dotted

logger = logging.getLogger("jengine")
PyTree = Any
Signature = dict[str, Any]

_PLAIN_CONTAINERS = (dict, list, tuple, type(None))  # without static data
_MAX_LINES = 5
_MAX_CHARACTERS = 200
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
    """Return `mode`, for None `$JENGINE_ON_RECOMPILE` or 'warn'; raise ValueError for another
    mode.
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

    Each change is reported once, with the changed paths: as a warning, after which the new
    signature is compiled too; or as an error, before it is compiled. The wrapper runs only when JAX
    traces, so it adds no cost to compiled calls. A changed sharding alone will recompile without a
    trace: callers detect it with `compilation_counter`, and call `check_shardings`.

    >>> guard = RecompilationGuard(lambda x: 2 * x, ["batch"], on_recompile="raise")
    >>> step = jax.jit(guard)
    >>> step(1.0).item(), step(2.0).item(), guard.traces
    (2.0, 4.0, 1)

    Args:
      fn: the function to wrap.
      arguments: names of the positional arguments, for the message.
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
        self._signatures: list[Signature] = []
        self._shardings: list[Signature] = []
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
        self._compare(self._signatures, abstract_signature(args, self._arguments), advice)
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
        shardings = sharding_signature(args, self._arguments)
        if self._shardings:  # the trace has already reported added and removed entries
            first = self._shardings[0]
            shardings = {path: shardings.get(path, sharding) for path, sharding in first.items()}
        self._compare(
            self._shardings, shardings, "Keep the shardings of arrays that the strategy has set."
        )

    def _compare(self, known: list[Signature], signature: Signature, advice: str) -> None:
        if signature in known:  # JAX has a program for it, even if the last call had another one
            return
        is_expected = self._expects_change
        self._expects_change = False
        if known and not is_expected and (changes := differences(known[0], signature)):
            text = "\n".join(
                [f"{self.name} is compiled again, because its arguments changed:", *changes]
            )
            if self._on_recompile == "raise":
                raise RecompilationError(f"{text}\n{advice}")
            logger.warning(
                "%s\n%s `on_recompile='raise'` in train_cfg makes this an error.", text, advice
            )
        known.append(signature)


def _shape(leaf: ArrayLike) -> jax.ShapeDtypeStruct:
    aval = jax.typeof(leaf)
    # an uncommitted array follows the others, so its current device would be wrong for another call
    sharding = leaf.sharding if isinstance(leaf, jax.Array) and leaf.committed else None
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=getattr(aval, "weak_type", False)
    )


@dataclasses.dataclass(frozen=True)
class _Static:
    """A static value: a field that is not a leaf, or auxiliary container data."""

    value: Any

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + '…'} (static)"


def abstract_signature(args: Sequence[PyTree], names: Sequence[str]) -> Signature:
    """Return what a trace depends on: shape, dtype and weak type of each leaf, container types,
    static values.

    Equal signatures share a compiled program.

    >>> abstract_signature([{"x": 1}], ["batch"])
    {'batch': 'a dict', 'batch.x': 'int32[] (weakly typed)'}

    Args:
      args: the arguments, pytrees of arrays or tracers.
      names: argument names.
    """
    return dict(
        entry for name, arg in zip(names, args, strict=True) for entry in _entries(arg, name)
    )


def sharding_signature(args: Sequence[PyTree], names: Sequence[str]) -> Signature:
    """Return what a compilation depends on besides the trace: devices and shardings.

    Host arrays and uncommitted device arrays are moved to the others' devices, so they all compare
    equal.
    """
    return {
        f"{name}.{dotted(path)}" if path else name: _describe_sharding(leaf)
        for name, arg in zip(names, args, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]
    }


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return a line for each changed entry, at most five of them."""
    changed = [
        path
        for path in {**first, **second}
        if first.get(path, "absent") != second.get(path, "absent")
    ]
    lines = [
        f"  {path}: was {first.get(path, 'absent')}, is {second.get(path, 'absent')}"
        for path in changed[:_MAX_LINES]
    ]
    return lines + (
        [f"  and {len(changed) - _MAX_LINES} more"] if len(changed) > _MAX_LINES else []
    )


def _entries(tree: PyTree, path: str) -> Iterator[tuple[str, Any]]:
    # flattens one level at a time, to find containers and their static data
    children, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    node = structure.node_data()  # type: ignore[attr-defined]
    if node is None:
        aval = jax.typeof(tree)
        yield (
            path,
            f"{aval.str_short()}{' (weakly typed)' if getattr(aval, 'weak_type', False) else ''}",
        )
        return
    kind, static = node
    yield path, "None" if tree is None else f"a {kind.__name__}"
    named_children = [(dotted(key), child) for key, child in children]
    fields = (
        [field.name for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []
    )
    child_names = [name for name, _ in named_children]
    if fields and set(child_names) <= set(fields):
        yield from (
            (f"{path}.{name}", _Static(getattr(tree, name)))
            for name in fields
            if name not in child_names
        )
    elif kind not in _PLAIN_CONTAINERS and static is not None and static is not kind:
        yield f"{path} of {kind.__name__}", _Static(static)
    for name, child in named_children:
        yield from _entries(child, f"{path}.{name}")


def _describe_sharding(leaf: ArrayLike) -> str:
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return "uncommitted"
    sharding = leaf.sharding
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    devices = ", ".join(sorted(str(device) for device in sharding.device_set))
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"on {devices}{memory}"
    # axes with one device and unsharded trailing dimensions have no effect
    mesh = {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
    spec = [_mesh_axes(part, mesh) for part in sharding.spec]
    while spec and spec[-1] == "-":
        spec.pop()
    if not spec:
        return f"replicated on {devices}{memory}"
    return f"sharded by {', '.join(spec)} over {mesh} on {devices}{memory}"


def _mesh_axes(part: object, mesh: dict[str, int]) -> str:
    names = part if isinstance(part, tuple) else (part,)
    return " x ".join(str(name) for name in names if name in mesh) or "-"
