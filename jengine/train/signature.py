"""Compute signatures of call arguments: all that JAX compiles for, by dotted path, and their differences."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jengine.paths import dotted

PyTree = Any
Signature = dict[str, Any]

_PLAIN = (dict, list, tuple, type(None))  # containers without data besides their children
_MOST, _LONGEST = 5, 200


@dataclasses.dataclass(frozen=True)
class _Static:
    """Wrap a static value: a field outside of the leaves, or the auxiliary data of a container."""

    value: Any

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{text if len(text) <= _LONGEST else text[:_LONGEST] + '…'} (static)"


def abstract_signature(args: Sequence[PyTree], names: Sequence[str]) -> Signature:
    """Return the inputs of a trace: shape, dtype and weak type of each leaf, container types, static values.

    Args:
      args: the arguments, arrays or their tracers.
      names: names of the arguments.

    Returns:
      Entries by dotted path; equal signatures share a compiled program.
    """
    signature: Signature = {}
    for name, arg in zip(names, args, strict=True):
        signature.update(_entries(arg, name))
    return signature


def sharding_signature(args: Sequence[PyTree], names: Sequence[str]) -> Signature:
    """Return the inputs of a recompilation without a trace: devices and shardings of the leaves.

    Host arrays and uncommitted device arrays follow the others, so they all compare equal.
    """
    return {
        f"{name}.{dotted(path)}" if path else name: _place(leaf)
        for name, arg in zip(names, args, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]
    }


def differences(first: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Return a line for each entry that changed, at most five."""
    changed = [path for path in {**first, **now} if first.get(path, "absent") != now.get(path, "absent")]
    lines = [f"  {path}: was {first.get(path, 'absent')}, is {now.get(path, 'absent')}" for path in changed[:_MOST]]
    return lines + ([f"  and {len(changed) - _MOST} more"] if len(changed) > _MOST else [])


def _entries(tree: PyTree, path: str) -> Iterator[tuple[str, Any]]:
    # one level at a time, to see the containers and their static data
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    node = structure.node_data()  # type: ignore[attr-defined]
    if node is None:
        yield path, _leaf(tree)
        return
    kind, about = node
    yield path, "None" if tree is None else f"a {kind.__name__}"
    named = [(dotted(key), child) for key, child in children]
    fields = [field.name for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []
    held = [name for name, _ in named]
    if fields and set(held) <= set(fields):
        yield from ((f"{path}.{name}", _Static(getattr(tree, name))) for name in fields if name not in held)
    elif kind not in _PLAIN and about is not None and about is not kind:
        yield f"{path} of {kind.__name__}", _Static(about)
    for name, child in named:
        yield from _entries(child, f"{path}.{name}")


def _leaf(leaf: Any) -> str:
    aval = jax.typeof(leaf)
    return f"{aval.str_short()}{' (weakly typed)' if getattr(aval, 'weak_type', False) else ''}"


def _place(leaf: Any) -> str:
    if not isinstance(leaf, jax.Array) or not leaf.committed:
        return "uncommitted"
    sharding = leaf.sharding
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    devices = ", ".join(sorted(str(device) for device in sharding.device_set))
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"on {devices}{memory}"
    # axes of one device and unsharded trailing dimensions have no effect
    mesh = {axis: size for axis, size in sharding.mesh.shape.items() if size > 1}
    spec = [_axes(part, mesh) for part in sharding.spec]
    while spec and spec[-1] == "-":
        spec.pop()
    if not spec:
        return f"copied to {devices}{memory}"
    return f"divided by {', '.join(spec)} over {mesh} of {devices}{memory}"


def _axes(part: Any, mesh: dict[str, int]) -> str:
    names = part if isinstance(part, tuple) else (part,)
    return " x ".join(str(name) for name in names if name in mesh) or "-"
