"""Dotted paths of pytree leaves, and the names that the same parameters have in PyTorch.

`backbone.layers_3.attn.kernel` is a Flax path; `backbone.layers.3.attn.weight` is its torch alias. Rules that match
names (paramwise keys, layer decay, sharding) try both, so that a config written for PyTorch models keeps matching.
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import jax

_TORCH_LEAVES = {"kernel": "weight", "scale": "weight", "embedding": "weight"}


def dotted(key_path: Sequence[Any]) -> str:
    """The dotted form of a JAX key path: `('a', 0, .b)` is `a.0.b`."""
    return jax.tree_util.keystr(tuple(key_path), simple=True, separator=".")


def flatten(tree: Any) -> dict[str, Any]:
    """The leaves of `tree` by dotted path, in the order in which JAX flattens them."""
    return {dotted(path): leaf for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]}


def map_with_path(fn: Callable[..., Any], tree: Any, *rest: Any) -> Any:
    """`jax.tree.map` whose function gets the dotted path first: `fn(path, leaf, *leaves_of_rest)`."""
    return jax.tree_util.tree_map_with_path(lambda path, *leaves: fn(dotted(path), *leaves), tree, *rest)


def torch_alias(path: str) -> str:
    """The path as a PyTorch model would spell it: `layers_3.norm.scale` is `layers.3.norm.weight`."""
    *modules, leaf = path.split(".")
    modules = [re.sub(r"_(\d+)$", r".\1", module) for module in modules]
    return ".".join([*modules, _TORCH_LEAVES.get(leaf, leaf)])


def spellings(path: str) -> tuple[str, str]:
    """The strings that a substring rule is tried against: the Flax path, then its torch alias.

    A parameter of the root module starts with a dot, as in MMEngine: the key `.pos_embed` matches `pos_embed` of the
    root and `x.pos_embed` of any module, but not `abs_pos_embed`.
    """
    alias = torch_alias(path)
    return (path if "." in path else f".{path}", alias if "." in alias else f".{alias}")
