"""Dotted paths for pytree leaves, and the translation to PyTorch's names.

`backbone.layers_3.attn.kernel` is a Flax path; `backbone.layers.3.attn.weight` is the torch alias.
Rules that match names (paramwise keys, layer decay, sharding) try both, so configs written for
PyTorch models keep working.

Flax wraps arrays: `nnx.Variable` in an `nnx.State` or `nnx.Module`, `nn.Partitioned` in Linen
parameters. JAX treats a wrapper as a tree level named `value`. The paths here omit that level, so a
tree has the same paths with and without wrappers. Dict keys and fields named `value` are kept.
"""

import difflib
import itertools
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax

_TORCH_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
# Looked up only if their module is loaded: otherwise no tree can contain them, and Flax need not be
# imported.
_WRAPPERS = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))


def dotted(key_path: Sequence[Any]) -> str:
    """Return the dotted form for a JAX key path: `('a', 0, .b)` is `a.0.b`.

    A key path does not show which levels are Flax wrappers; use `flatten` to get a tree's paths.
    """
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator=".")


def leaves_with_path(tree: object) -> list[tuple[str, Any]]:
    """Return pairs with dotted path and leaf, in JAX's flattening order."""
    wrappers = _wrapper_types()
    if not wrappers:
        return [
            (dotted(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]
        ]
    pairs: list[tuple[str, Any]] = []
    nodes = jax.tree_util.tree_flatten_with_path(
        tree, is_leaf=lambda node: isinstance(node, wrappers)
    )[0]
    for path, node in nodes:
        if isinstance(node, wrappers):
            inner = jax.tree_util.tree_flatten_with_path(node)[0]
            pairs += [(dotted((*path, *inner_path[1:])), leaf) for inner_path, leaf in inner]
        else:
            pairs.append((dotted(path), node))
    return pairs


def flatten(tree: object) -> dict[str, Any]:
    """Return the leaves in `tree` by dotted path, in JAX's flattening order.

    >>> flatten({"dense": {"kernel": 1, "bias": 2}})
    {'dense.bias': 2, 'dense.kernel': 1}
    """
    return dict(leaves_with_path(tree))


def nest(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Return nested dicts with the leaves at the dotted paths.

    >>> nest({"a.b": 1})
    {'a': {'b': 1}}
    """
    tree: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, name = path.split(".")
        node = tree
        for parent in parents:
            node = node.setdefault(parent, {})
        node[name] = leaf
    return tree


def map_with_path(fn: Callable[..., Any], tree: object, *rest: object) -> Any:
    """Map a function over trees like `jax.tree.map`, and pass it each leaf's dotted path first.

    Args:
      fn: called as `fn(path, leaf, *subtrees)`, where `path` is the path in `tree`.
      tree: the tree whose structure the result has.
      *rest: trees with the same structure, or with subtrees instead of leaves.
    """
    treedef: Any = jax.tree.structure(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return treedef.unflatten(
        [
            fn(path, leaf, *nodes)
            for (path, leaf), *nodes in zip(leaves_with_path(tree), *others, strict=True)
        ]
    )


def unwrap(tree: object) -> Any:
    """Return `tree` with the content in place of each Flax wrapper, so that JAX's own key paths
    match `flatten`.
    """
    wrappers = _wrapper_types()

    def unwrap_node(node: object) -> object:
        if not isinstance(node, wrappers):
            return node
        return jax.tree.leaves(node, is_leaf=lambda child: child is not node)[0]

    return (
        jax.tree.map(unwrap_node, tree, is_leaf=lambda node: isinstance(node, wrappers))
        if wrappers
        else tree
    )


def torch_alias(path: str) -> str:
    """Return a parameter's name in PyTorch.

    >>> torch_alias("layers_3.norm.scale")
    'layers.3.norm.weight'
    """
    *modules, leaf = path.split(".")
    modules = [re.sub(r"_(\d+)$", r".\1", module) for module in modules]
    return ".".join([*modules, _TORCH_LEAVES.get(leaf, leaf)])


def path_aliases(path: str) -> tuple[str, str]:
    """Return the names that substring rules are matched against: the Flax path and the torch alias.

    Names at the root start with a dot, as in MMEngine: the key `.pos_embed` matches `pos_embed` at
    the root and `x.pos_embed` in any module, but not `abs_pos_embed`.
    """
    alias = torch_alias(path)
    return (path if "." in path else f".{path}", alias if "." in alias else f".{alias}")


def closest_paths(path: str, candidates: Iterable[str]) -> str:
    """Return a hint '; closest: ...' with up to three of `candidates` or modules in them.

    Empty if none is close.
    """
    names = {
        name: None
        for candidate in candidates
        for name in itertools.accumulate(candidate.split("."), "{}.{}".format)
    }
    close = difflib.get_close_matches(path, names, n=3, cutoff=0.5)
    return f"; closest: {', '.join(close)}" if close else ""


def _wrapper_types() -> tuple[type, ...]:
    """Return the wrapper classes in the Flax modules that are loaded."""
    # a module that another thread imports at this moment has no classes yet, and no tree has them
    found = (vars(sys.modules[m]).get(name) for m, name in _WRAPPERS if m in sys.modules)
    return tuple(cls for cls in found if cls is not None)
