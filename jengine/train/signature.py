"""Call signatures, which determine whether JAX compiles again, and the differences between them."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jengine.paths import dotted

PyTree = Any
Signature = dict[str, Any]

_PLAIN_CONTAINERS = (dict, list, tuple, type(None))  # without static data
_MAX_LINES, _MAX_CHARACTERS = 5, 200


@dataclasses.dataclass(frozen=True)
class _Static:
    """A static value: a field that is not a leaf, or auxiliary container data."""

    value: Any

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + '…'} (static)"


def abstract_signature(args: Sequence[PyTree], names: Sequence[str]) -> Signature:
    """Return what a trace depends on: shape, dtype and weak type of each leaf, container types, static values.

    Equal signatures share a compiled program.

    >>> abstract_signature([{"x": 1}], ["batch"])
    {'batch': 'a dict', 'batch.x': 'int32[] (weakly typed)'}

    Args:
      args: the arguments, pytrees of arrays or tracers.
      names: argument names.
    """
    return dict(entry for name, arg in zip(names, args, strict=True) for entry in _entries(arg, name))


def sharding_signature(args: Sequence[PyTree], names: Sequence[str]) -> Signature:
    """Return what a compilation depends on besides the trace: devices and shardings.

    Host arrays and uncommitted device arrays are moved to the others' devices, so they all compare equal.
    """
    return {
        f"{name}.{dotted(path)}" if path else name: _describe_sharding(leaf)
        for name, arg in zip(names, args, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]
    }


def differences(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[str]:
    """Return a line for each changed entry, at most five of them."""
    changed = [path for path in {**first, **second} if first.get(path, "absent") != second.get(path, "absent")]
    lines = [
        f"  {path}: was {first.get(path, 'absent')}, is {second.get(path, 'absent')}" for path in changed[:_MAX_LINES]
    ]
    return lines + ([f"  and {len(changed) - _MAX_LINES} more"] if len(changed) > _MAX_LINES else [])


def is_weakly_typed(aval: Any) -> bool:
    """Return whether an abstract value has a weak type; not all kinds of them have the attribute."""
    return getattr(aval, "weak_type", False)


def _entries(tree: PyTree, path: str) -> Iterator[tuple[str, Any]]:
    # flattens one level at a time, to find containers and their static data
    children, structure = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)
    node = structure.node_data()  # type: ignore[attr-defined]
    if node is None:
        yield path, _describe_leaf(tree)
        return
    kind, static = node
    yield path, "None" if tree is None else f"a {kind.__name__}"
    named_children = [(dotted(key), child) for key, child in children]
    fields = [field.name for field in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []
    child_names = [name for name, _ in named_children]
    if fields and set(child_names) <= set(fields):
        yield from ((f"{path}.{name}", _Static(getattr(tree, name))) for name in fields if name not in child_names)
    elif kind not in _PLAIN_CONTAINERS and static is not None and static is not kind:
        yield f"{path} of {kind.__name__}", _Static(static)
    for name, child in named_children:
        yield from _entries(child, f"{path}.{name}")


def _describe_leaf(leaf: Any) -> str:
    aval = jax.typeof(leaf)
    return f"{aval.str_short()}{' (weakly typed)' if is_weakly_typed(aval) else ''}"


def _describe_sharding(leaf: Any) -> str:
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


def _mesh_axes(part: Any, mesh: dict[str, int]) -> str:
    names = part if isinstance(part, tuple) else (part,)
    return " x ".join(str(name) for name in names if name in mesh) or "-"
