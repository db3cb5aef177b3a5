"""Which arguments changed, for which a program compiles again."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import jax

from jengine.config.paths import dotted

PyTree = Any

_PLAIN_CONTAINERS = (dict, list, tuple, type(None))  # without static data
_MAX_LINES = 5
_MAX_CHARACTERS = 200


def list_changed_arguments(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the paths of the arguments that changed, with both values: at most five lines.

    Explainer, for `RecompilationGuard`.
    """
    if "changed" not in context:
        return None
    names, first, now = context["changed"]
    if isinstance(now, Mapping):  # placed arrays by path
        # the trace has already reported added and removed entries
        before, after = (
            {
                ".".join(filter(None, (names[path[0].idx], dotted(path[1:])))): _place(leaf)
                for path, leaf in placed.items()
                if path in first and path in now
            }
            for placed in (first, now)
        )
    else:
        before, after = (abstract_signature(each, names) for each in (first, now))
    return "\n".join(_differences(before, after))


def abstract_signature(flat: tuple[Any, Any], names: Any) -> dict[str, str]:
    """Return what a trace depends on: shape, dtype and weak type of each leaf, container types,
    static values.

    >>> abstract_signature(jax.tree.flatten(({"x": "int32[3]"},)), ["batch"])
    {'batch': 'a dict', 'batch.x': 'int32[3]'}

    Args:
      flat: the leaves' descriptions, and the structure of the tuple of arguments.
      names: argument names.
    """
    args = jax.tree.unflatten(flat[1], flat[0])
    pairs = zip(args, names, strict=True)
    return {path: text for arg, name in pairs for path, text in _entries(arg, name)}


def _differences(first: Mapping[str, str], second: Mapping[str, str]) -> list[str]:
    pairs = {
        path: (first.get(path, "absent"), second.get(path, "absent"))
        for path in {**first, **second}
    }
    lines = [f"  {path}: was {old}, is {new}" for path, (old, new) in pairs.items() if old != new]
    more = len(lines) - _MAX_LINES
    return lines[:_MAX_LINES] + ([f"  and {more} more"] if more > 0 else [])


def _entries(tree: PyTree, path: str) -> Iterator[tuple[str, str]]:
    # flattens one level at a time, to find containers and their static data
    children, structure = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: node is not tree
    )
    node = structure.node_data()  # type: ignore[attr-defined]
    if node is None:
        yield path, tree
        return
    kind, static = node
    yield path, "None" if tree is None else f"a {kind.__name__}"
    named = {dotted(key): child for key, child in children}
    fields = [x.name for x in dataclasses.fields(tree)] if dataclasses.is_dataclass(tree) else []
    if fields and named.keys() <= set(fields):
        for name in fields:
            if name not in named:
                yield f"{path}.{name}", _describe_static(getattr(tree, name))
    elif kind not in _PLAIN_CONTAINERS and static is not None and static is not kind:
        yield f"{path} of {kind.__name__}", _describe_static(static)
    for name, child in named.items():
        yield from _entries(child, f"{path}.{name}")


def _describe_static(value: Any) -> str:
    text = repr(value)
    return f"{text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + '…'} (static)"


def _place(leaf: jax.ShapeDtypeStruct) -> str:
    """Return the sharding of an array, the devices and the kind of memory."""
    sharding = leaf.sharding
    if sharding is None:
        return "uncommitted"
    devices = ", ".join(sorted(map(str, sharding.device_set)))
    memory = "" if sharding.memory_kind in (None, "device") else f" in {sharding.memory_kind}"
    if not isinstance(sharding, jax.sharding.NamedSharding):
        return f"on {devices}{memory}"
    return f"{sharding.spec} over {dict(sharding.mesh.shape)} on {devices}{memory}"
