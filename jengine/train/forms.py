"""The form of a function's arguments: all that JAX compiles for, by path, and what is told of a difference."""

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jengine.paths import dotted

PyTree = Any
Form = dict[str, Any]

_PLAIN = (dict, list, tuple, type(None))  # containers that are their children and nothing else
_MOST, _LONGEST = 5, 200


@dataclasses.dataclass(frozen=True)
class _Static:
    """A value that is compiled in: a field outside the leaves, or what a container says of itself."""

    value: Any

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{text if len(text) <= _LONGEST else text[:_LONGEST] + '…'} (static)"


def form_of(args: Sequence[PyTree], names: Sequence[str]) -> Form:
    """What is traced: the shape, dtype and weak type of every leaf, every container's type, and static values.

    Args:
      args: the arguments, arrays or their tracers.
      names: what they are called.

    Returns:
      Entries by dotted path; equal entries are compiled alike.
    """
    form: Form = {}
    for name, arg in zip(names, args, strict=True):
        form.update(_entries(arg, name))
    return form


def placement_of(args: Sequence[PyTree], names: Sequence[str]) -> Form:
    """What is compiled for without a new trace: on which devices the leaves lie, and how they are divided.

    Host arrays, and device arrays that nobody tied to a device, go where the others are: they count as alike.
    """
    return {
        f"{name}.{dotted(path)}" if path else name: _place(leaf)
        for name, arg in zip(names, args, strict=True)
        for path, leaf in jax.tree_util.tree_flatten_with_path(arg)[0]
    }


def differences(first: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """A line for each entry that is not as it was, at most five."""
    changed = [path for path in {**first, **now} if first.get(path, "absent") != now.get(path, "absent")]
    lines = [f"  {path}: was {first.get(path, 'absent')}, is {now.get(path, 'absent')}" for path in changed[:_MOST]]
    return lines + ([f"  and {len(changed) - _MOST} more"] if len(changed) > _MOST else [])


def _entries(tree: PyTree, path: str) -> Iterator[tuple[str, Any]]:
    # one level at a time: only so are the containers seen, and what they hold beside their leaves
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
        return "tied to no device"
    sharding = leaf.sharding
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    devices = ", ".join(sorted(str(device) for device in sharding.device_set))
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"on {devices}{memory}"
    # axes of one device say nothing, nor do undivided dimensions at the end
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
