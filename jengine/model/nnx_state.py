"""Conversion between an NNX state and nested dicts with arrays, as in checkpoints."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
from flax import traverse_util

from jengine.config.paths import dotted
from jengine.model.model import PyTree
from jengine.model.module_types import ModuleType, find_module_types

if TYPE_CHECKING:
    from flax import nnx

Path = tuple[str, ...]


def list_module_types(module: "nnx.Module") -> dict[str, ModuleType]:
    """Return the types in an `nnx.Module` by dotted path, in definition order."""
    from flax import nnx

    modules = {tuple(map(str, path)): node for path, node in nnx.iter_modules(module)}
    # `iter_modules` goes by name, but rules that count layers need the order of definition.

    def position(path: Path) -> list[int]:
        """Return where each node in the path stands among the parent's attributes."""
        attributes = [
            list(vars(modules[path[:n]])) if path[:n] in modules else [] for n in range(len(path))
        ]
        pairs = zip(path, attributes, strict=True)
        return [names.index(name) if name in names else len(names) for name, names in pairs]

    def describe(node: Any) -> tuple[type, dict[str, Any], dict[str, tuple[int, ...]]]:
        own = {name: x.get_value() for name, x in vars(node).items() if isinstance(x, nnx.Param)}
        return (
            type(node),
            vars(node),
            {name: x.shape for name, x in own.items() if hasattr(x, "shape")},
        )

    return find_module_types(
        {path: describe(modules[path]) for path in sorted(modules, key=position)}, _layer_shapes
    )


def _layer_shapes(kind: str, a: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a layer with the attributes `a`; {} if it has none."""
    if kind == "Linear":
        return {"kernel": (a["in_features"], a["out_features"]), "bias": (a["out_features"],)}
    if kind == "LinearGeneral":
        return {"kernel": (*a["in_features"], *a["out_features"]), "bias": tuple(a["out_features"])}
    if "kernel_shape" in a:  # Conv, ConvTranspose and Einsum
        bias = a.get("bias_shape") or [a.get("out_features", 0)]
        return {"kernel": tuple(a["kernel_shape"]), "bias": tuple(bias)}
    if kind == "Embed":
        return {"embedding": (a["num_embeddings"], a["features"])}
    if "num_features" in a or "group_size" in a:  # norms
        size = a["num_features"] if "num_features" in a else a["num_groups"] * a["group_size"]
        return {"scale": (size,), "bias": (size,)}
    return {}


def list_variables(state: "nnx.State") -> dict[Path, Any]:
    """Return the variables in an NNX state by path, and arrays that are not in a variable."""
    nodes, _ = jax.tree_util.tree_flatten_with_path(state, is_leaf=is_variable)
    return {_keys(path): node for path, node in nodes}


def to_dict(variables: Mapping[Path, Any]) -> PyTree:
    """Return variables as nested dicts with arrays and string keys: list indices become '0', '1', …

    Each variable may hold an array, a Python number, or a pytree, whose levels become dicts.
    """
    # Not `nnx.to_pure_dict`, whose keys for lists are integers: paths in rules and checkpoints are
    # strings.
    arrays = {
        (*path, *inner): _to_storable(jnp.asarray(leaf))
        for path, variable in variables.items()
        for inner, leaf in named_leaves(variable).items()
    }
    return traverse_util.unflatten_dict(arrays)


def from_dict(values: PyTree, like: "nnx.State") -> Any:
    """Return an NNX state with the structure of `like` and the arrays in `values`, nested dicts
    as from `to_dict`.
    """
    arrays = traverse_util.flatten_dict(values)
    leaves = [
        _from_storable(arrays[*path, *inner], struct.dtype)
        for path, variable in list_variables(like).items()
        # a variable may hold a tree, such as a quantized array
        for inner, struct in named_leaves(variable).items()
    ]
    return jax.tree.unflatten(jax.tree.structure(like), leaves)


def shapes(variable: Any) -> dict[Path, tuple[int, ...]]:
    """Return the array shapes in a variable by path."""
    return {path: jnp.shape(leaf) for path, leaf in named_leaves(variable).items()}


def named_leaves(variable: Any) -> dict[Path, Any]:
    """Return the arrays in a variable by path, in JAX's flattening order.

    An array has the path ().
    """
    leaves = jax.tree_util.tree_flatten_with_path(variable)[0]
    return {_keys(path[is_variable(variable) :]): leaf for path, leaf in leaves}


def is_variable(node: object) -> bool:
    """Return whether a node is an `nnx.Variable`."""
    from flax import nnx

    return isinstance(node, nnx.Variable)


def _keys(path: Sequence[Any]) -> Path:
    return tuple(dotted((key,)) for key in path)


# TensorStore has no unsigned 4-bit integers, the codes of NF4 weights; the same bits as int4 can be
# saved.
def _to_storable(leaf: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(leaf, jnp.int4) if leaf.dtype == jnp.uint4 else leaf


def _from_storable(leaf: Any, dtype: jnp.dtype) -> Any:
    return jax.lax.bitcast_convert_type(leaf, dtype) if dtype == jnp.uint4 else leaf
