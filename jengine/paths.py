"""Dotted paths of pytree leaves, and the names that the same parameters have in PyTorch.

`backbone.layers_3.attn.kernel` is a Flax path; `backbone.layers.3.attn.weight` is its torch alias. Rules that match
names (paramwise keys, layer decay, sharding) try both, so that a config written for PyTorch models keeps matching.

Flax wraps arrays: `nnx.Variable` in an `nnx.State` or `nnx.Module`, `nn.Partitioned` in Linen parameters. JAX counts
such a wrapper as a level of the tree, called `value`; the paths here leave that level out, so that a tree has the same
paths with and without its wrappers. A dict key or a field that is called `value` stays.
"""

import re
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax

_TORCH_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}
# Looked up only where their module is loaded: a tree cannot hold them otherwise, and `import jengine` stays light.
_WRAPPERS = (("flax.nnx", "Variable"), ("flax.core.meta", "AxisMetadata"))


def dotted(key_path: Sequence[Any]) -> str:
    """Return the dotted form of a JAX key path: `('a', 0, .b)` is `a.0.b`.

    A key path alone does not show what is a wrapper of Flax; for the leaves of a tree use `flatten`.
    """
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator=".")


def leaves_with_path(tree: Any) -> list[tuple[str, Any]]:
    """Return pairs of dotted path and leaf, in the order in which JAX flattens `tree`."""
    wrappers = _wrapper_types()
    if not wrappers:
        return [(dotted(path), leaf) for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]]
    found: list[tuple[str, Any]] = []
    nodes = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: isinstance(node, wrappers))[0]
    for path, node in nodes:
        if isinstance(node, wrappers):
            inner = jax.tree_util.tree_flatten_with_path(node)[0]
            found += [(dotted((*path, *below[1:])), leaf) for below, leaf in inner]
        else:
            found.append((dotted(path), node))
    return found


def flatten(tree: Any) -> dict[str, Any]:
    """Return the leaves of `tree` by dotted path, in the order in which JAX flattens them."""
    return dict(leaves_with_path(tree))


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """Map a function of dotted path and leaves over trees, `fn(path, leaf, *leaves_of_rest)`, as `jax.tree.map` does.

    Args:
      fn: gets the path in `tree` first.
      tree: decides the structure of the result.
      *rest: trees that have the structure of `tree`, or continue below its leaves.
    """
    treedef: Any = jax.tree.structure(tree)
    others = [treedef.flatten_up_to(other) for other in rest]
    return treedef.unflatten(
        [fn(*named, *leaves) for named, *leaves in zip(leaves_with_path(tree), *others, strict=True)]
    )


def unwrap(tree: Any) -> Any:
    """Return `tree` with what Flax's wrappers hold in their place, so that JAX's own paths are those of `flatten`."""
    wrappers = _wrapper_types()

    def held(node: Any) -> Any:
        if not isinstance(node, wrappers):
            return node
        return jax.tree.leaves(node, is_leaf=lambda below: below is not node)[0]

    return jax.tree.map(held, tree, is_leaf=lambda node: isinstance(node, wrappers)) if wrappers else tree


def torch_alias(path: str) -> str:
    """Return the path as a PyTorch model would spell it: `layers_3.norm.scale` is `layers.3.norm.weight`."""
    *modules, leaf = path.split(".")
    modules = [re.sub(r"_(\d+)$", r".\1", module) for module in modules]
    return ".".join([*modules, _TORCH_LEAVES.get(leaf, leaf)])


def spellings(path: str) -> tuple[str, str]:
    """Return the strings that a substring rule is tried against: the Flax path, then its torch alias.

    A parameter of the root module starts with a dot, as in MMEngine: the key `.pos_embed` matches `pos_embed` of the
    root and `x.pos_embed` of any module, but not `abs_pos_embed`.
    """
    alias = torch_alias(path)
    return (path if "." in path else f".{path}", alias if "." in alias else f".{alias}")


def _wrapper_types() -> tuple[type, ...]:
    return tuple(vars(sys.modules[module])[name] for module, name in _WRAPPERS if module in sys.modules)
