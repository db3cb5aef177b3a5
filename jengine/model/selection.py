"""Selection of the entries in batches and outputs that arguments such as `label=`, `output=` and
`inputs=` name.
"""

import dataclasses
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jengine.config.errors import UnknownNameError, did_you_mean

# an index, a name, or a dotted path of these: 1, 'label', 'heads.0', 'aux.logits'
Selector = int | str
_MISSING = object()
_MAX_LISTED = 16


def select(tree: object, selector: Selector, argument: str, tree_name: str) -> Any:
    """Return an entry in a tuple, list, dict, NamedTuple, dataclass or registered pytree node.

    >>> select({"heads": [1, 2]}, "heads.1", "Loss.output", "outputs")
    2

    Args:
      tree: the batch, the outputs or the predictions.
      selector: the entry's index or name; or, for an entry in an entry, a dotted path.
      argument: the argument that holds the selector, for the error message: `CrossEntropy.label`.
      tree_name: 'batch', 'outputs' or 'predictions', for the error message.

    Raises:
      UnknownNameError: there is no such entry; the message lists those that exist.
    """
    entry = find(tree, selector, _MISSING)
    if entry is _MISSING:
        hint = (
            did_you_mean(selector, [path for path, _ in _leaves(tree)])
            if isinstance(selector, str)
            else ""
        )
        raise UnknownNameError(
            f"`{argument}` must be an entry of the {tree_name}, got {selector!r}; "
            f"{describe_tree(tree, tree_name)}{hint}"
        )
    return entry


def select_array(tree: object, selector: Selector | None, argument: str, tree_name: str) -> Any:
    """Return an entry that is an array, or `tree` itself if the selector is None; see `select`."""
    entry = tree if selector is None else select(tree, selector, argument, tree_name)
    if _children(entry):
        kind = "None" if selector is None else f"{selector!r}, a {type(entry).__name__}"
        raise UnknownNameError(
            f"`{argument}` must be set to an array of the {tree_name}, got {kind}; "
            f"{describe_tree(tree, tree_name)}"
        )
    return entry


def find(tree: object, selector: Selector, default: object = None) -> Any:
    """Return an entry like `select`; `default` if it does not exist."""
    parts = [str(selector)] if str(selector) in _children(tree) else str(selector).split(".")
    for part in parts:
        children = _children(tree)
        if part in children:
            tree = children[part]
        elif children and isinstance(tree, Sequence) and re.fullmatch(r"-?\d+", part):
            # a field of a NamedTuple, or -1
            if not -len(tree) <= int(part) < len(tree):
                return default
            tree = tree[int(part)]
        else:
            return default
    return tree


def _children(node: object) -> dict[str, Any]:
    """Return a node's entries by name or index; none for an array."""
    if isinstance(node, Mapping):
        return {str(key): child for key, child in node.items()}
    if dataclasses.is_dataclass(node):
        return {field.name: getattr(node, field.name) for field in dataclasses.fields(node)}
    pairs = jax.tree_util.tree_flatten_with_path(node, is_leaf=lambda child: child is not node)[0]
    return {jax.tree_util.keystr(path, simple=True): child for path, child in pairs if path}


def _leaves(tree: object, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value for each entry that has no entries itself."""
    for name, child in _children(tree).items():
        path = f"{prefix}{name}"
        if _children(child):
            yield from _leaves(child, f"{path}.")
        else:
            yield path, child


def describe_tree(tree: object, tree_name: str) -> str:
    """Return the entries with shapes, as a clause: 'the batch has image f32[8,4], label i32[8]'."""
    is_plural = tree_name.endswith("s")
    if not _children(tree):
        verb = "are" if is_plural else "is"
        return f"the {tree_name} {verb} {describe_array(tree)}, without entries"
    leaves = [f"{path} {describe_array(leaf)}" for path, leaf in _leaves(tree)]
    listed = ", ".join(leaves[:_MAX_LISTED]) or "no arrays"
    more = f" and {len(leaves) - _MAX_LISTED} more" if len(leaves) > _MAX_LISTED else ""
    return f"the {tree_name} {'have' if is_plural else 'has'} {listed}{more}"


def describe_array(value: object) -> str:
    """Return an array's dtype and shape in JAX's short form; for any other value the type.

    >>> describe_array(jax.numpy.zeros((8, 4)))
    'f32[8,4]'
    """
    if not hasattr(value, "shape") or not hasattr(value, "dtype"):
        return type(value).__name__
    dtype = re.sub(r"^(f|bf|i|u|c)[a-z]+(?=\d)", r"\1", str(value.dtype))
    return f"{dtype}[{','.join(map(str, value.shape))}]"
