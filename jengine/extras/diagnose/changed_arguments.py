"""Which arguments changed, for which a program compiles again."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax

from jengine.config.paths import dotted

PyTree = Any
Signature = dict[str, Any]

_PLAIN_CONTAINERS = (dict, list, tuple, type(None))  # without static data
_MAX_LINES = 5
_MAX_CHARACTERS = 200


def list_changed_arguments(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return the paths of the arguments that changed, with both values: at most five lines.

    Explainer, for `RecompilationGuard`.
    """
    if "changed" not in context:
        return None
    names, *both = context["changed"]
    before, after = (
        dict(entry for name, arg in zip(names, args, strict=True) for entry in _entries(arg, name))
        for args in both
    )
    return "\n".join(differences(before, after, _describe_shape))


@dataclasses.dataclass(frozen=True)
class _Static:
    """A static value: a field that is not a leaf, or auxiliary container data."""

    value: Any

    def __str__(self) -> str:
        text = repr(self.value)
        return f"{text if len(text) <= _MAX_CHARACTERS else text[:_MAX_CHARACTERS] + '…'} (static)"


def differences(
    first: Signature, second: Signature, describe: Callable[[Any], str] = str
) -> list[str]:
    """Return a line for each entry with another description, at most five of them."""
    before, after = (
        {path: describe(value) for path, value in each.items()} for each in (first, second)
    )
    lines = [
        f"  {path}: was {before.get(path, 'absent')}, is {after.get(path, 'absent')}"
        for path in {**before, **after}
        if before.get(path) != after.get(path)
    ]
    more = [f"  and {len(lines) - _MAX_LINES} more"] if len(lines) > _MAX_LINES else []
    return lines[:_MAX_LINES] + more


def _describe_shape(value: Any) -> str:
    if not isinstance(value, jax.ShapeDtypeStruct):
        return str(value)
    weak = " (weakly typed)" if value.weak_type else ""
    return f"{jax.typeof(value).str_short()}{weak}"


def _entries(tree: PyTree, path: str) -> Iterator[tuple[str, Any]]:
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
