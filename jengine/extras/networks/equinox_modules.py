"""Trees of which a part is trained, such as Equinox modules: split into arrays by path and static
parts, and put together again.

An `eqx.Module` is a pytree with arrays, and with functions and numbers that are no parameters, such
as the activation in an `eqx.nn.MLP`. The engine trains and stores nested dicts with arrays, so that
paths, checkpoints and rules are as for other networks; user functions get the module itself.
"""

import dataclasses
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.extras.networks.path_rules import check_match, compile_rule, is_match
from jengine.model.model import FROZEN, ModelState, Params, PyTree
from jengine.model.module_types import ModuleType, find_module_types, has_equinox_modules

# A function of the dotted path and the array, or regular expressions for paths
Trainable = Callable[[str, Any], bool] | Sequence[str] | None


def select_params(tree: PyTree) -> tuple[PyTree, dict[str, ModuleType]]:
    """Return modules with None for all but the floating-point arrays, `eqx.filter(tree,
    eqx.is_inexact_array)`, and the module types by dotted path.
    """
    fixed = _fixed_paths(tree)
    params = paths.map_with_path(
        lambda path, leaf: leaf if _is_trained(leaf) and not path.startswith(fixed) else None, tree
    )
    return params, list_module_types(tree)


def list_module_types(tree: PyTree) -> dict[str, ModuleType]:
    """Return the module types in a tree by dotted path, in definition order."""
    modules = {}
    for path, module in _iterate_modules(tree, ()):
        fields: dict[str, Any] = {
            x.name: getattr(module, x.name, None) for x in dataclasses.fields(module)
        }
        modules[path] = (
            type(module),
            fields,
            {name: x.shape for name, x in fields.items() if _is_trained(x)},
        )
    return find_module_types(modules, _layer_shapes)


def _layer_shapes(kind: str, a: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of a layer with the attributes `a`; {} if it has none."""
    if kind == "Linear":
        sizes = [1 if a[name] == "scalar" else a[name] for name in ("out_features", "in_features")]
        return {"weight": tuple(sizes), "bias": tuple(sizes[:1])}
    if kind.startswith("Conv") and "in_channels" in a:
        kernel = (a["out_channels"], a["in_channels"] // a["groups"], *a["kernel_size"])
        return {"weight": kernel, "bias": (a["out_channels"], *(1,) * a["num_spatial_dims"])}
    if kind == "Embedding":
        return {"weight": (a["num_embeddings"], a["embedding_size"])}
    sizes = [a[name] for name in ("shape", "channels", "input_size") if a.get(name) is not None]
    if kind.endswith("Norm") and sizes:
        shape = (sizes[0],) if isinstance(sizes[0], int) else tuple(sizes[0])
        return dict.fromkeys(("weight", "bias"), shape)
    return {}


class Partition(NamedTuple):
    """What modules and their state have beside arrays, from which `combine` builds them again."""

    module: "_Static"
    state: "_Static"
    has_frozen: bool  # whether there are arrays that are not trained

    def combine(
        self, params: Params, model_state: ModelState, train: bool
    ) -> tuple[PyTree, PyTree]:
        """Return the module and the state, an `eqx.nn.State` or {}, with the arrays from
        `split_module`; in inference mode without dropout, and with running statistics.
        """
        frozen, state = (
            (model_state[FROZEN], model_state["state"]) if self.has_frozen else ({}, model_state)
        )
        module = self.module.build({**paths.flatten(params), **paths.flatten(frozen)})
        if not train and has_equinox_modules(module):
            module = sys.modules["equinox"].nn.inference_mode(module)
        return module, self.state.build(paths.flatten(state))

    def update(self, model_state: ModelState, state: PyTree) -> PyTree:
        """Return the model state with the arrays in a new `eqx.nn.State`."""
        arrays = paths.nest(_state_leaves(state))
        return {**model_state, "state": arrays} if self.has_frozen else arrays


class _Static(NamedTuple):
    """Tree structure, and the leaves that are not arrays."""

    treedef: Any
    names: tuple[str, ...]  # dotted paths of all leaves
    leaves: Mapping[str, Any]  # functions, numbers, strings by path

    def build(self, arrays: Mapping[str, Any]) -> PyTree:
        return self.treedef.unflatten(
            [arrays[x] if x in arrays else self.leaves[x] for x in self.names]
        )


def split_module(
    module: PyTree, state: PyTree, trainable: Trainable = None
) -> tuple[Partition, PyTree, PyTree, dict[str, ModuleType]]:
    """Split modules and an `eqx.nn.State` into static parts, parameters and model state.

    Args:
      module: an `eqx.Module`, a tree with several, or another tree of arrays.
      state: the state from `eqx.nn.make_with_state`; {} for none.
      trainable: which floating-point arrays to train; None for all. Those within a class
        `NonTrainable`, as that of paramax, never are: it stops their gradients.

    Returns:
      The partition, the trained arrays as nested dicts, and the model state: the arrays in
      `state` as nested dicts, in an item `state` if the module has other arrays, which are in
      `frozen`; and the module types by dotted path.

    Raises:
      ConfigError: `trainable` selects nothing, or has a rule that does.
    """
    if not has_equinox_modules(module):
        module = jax.tree.map(jnp.asarray, module)  # its numbers are arrays too
    if any(_is_state(node) for node in jax.tree.leaves(module, is_leaf=_is_state)):
        raise TypeError(
            "the parameters must be modules, got an eqx.nn.State among them; `init` may return "
            "`(module, state)` if "
            "`loss` has an argument `model_state`, and returns `(losses, model_state)`"
        )
    leaves = paths.flatten(module)
    state_leaves = _state_leaves(state)
    is_selected = _build_filter(trainable, leaves)
    fixed = _fixed_paths(module)
    params = {
        path: leaf
        for path, leaf in leaves.items()
        if _is_trained(leaf) and not path.startswith(fixed) and is_selected(path, leaf)
    }
    if trainable is not None and not params:
        raise ConfigError(
            "FunctionalModel: `trainable` must select a floating-point array, got none of "
            f"{', '.join(leaves)}"
        )
    # Keys and integer tables cannot be differentiated, but belong in checkpoints.
    frozen = {
        path: x for path, x in leaves.items() if isinstance(x, jax.Array) and path not in params
    }
    static = {path: x for path, x in leaves.items() if not isinstance(x, jax.Array)}
    partition = Partition(
        _Static(jax.tree.structure(module), tuple(leaves), static),
        _Static(jax.tree.structure(state), tuple(state_leaves), {}),
        bool(frozen),
    )
    model_state = paths.nest(state_leaves)
    return (
        partition,
        paths.nest(params),
        {FROZEN: paths.nest(frozen), "state": model_state} if frozen else model_state,
        list_module_types(module),
    )


def _build_filter(trainable: Trainable, leaves: Mapping[str, Any]) -> Callable[[str, Any], bool]:
    if trainable is None:
        return lambda path, leaf: True
    if callable(trainable):
        return trainable
    rules = [compile_rule(pattern, "FunctionalModel") for pattern in trainable]
    for rule in rules:
        check_match("FunctionalModel", "trainable", "a parameter", rule, list(leaves))
    return lambda path, leaf: any(is_match(rule, path) for rule in rules)


def _fixed_paths(tree: PyTree) -> tuple[str, ...]:
    """Return the starts of the paths of arrays whose gradients their module stops."""
    # By name: paramax and flowjax have a class each, and neither need be installed.
    return tuple(
        "".join(f"{name}." for name in path)
        for path, module in _iterate_modules(tree, ())
        if any(cls.__name__ == "NonTrainable" for cls in type(module).__mro__)
    )


def _is_module(node: object) -> bool:
    # If Equinox is not imported, no tree can contain its modules
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.Module)


def _is_state(node: object) -> bool:
    equinox = sys.modules.get("equinox")
    return equinox is not None and isinstance(node, equinox.nn.State)


def _is_trained(leaf: Any) -> bool:
    return isinstance(leaf, jax.Array | jax.ShapeDtypeStruct) and jax.numpy.issubdtype(
        leaf.dtype, jax.numpy.inexact
    )


def _iterate_modules(node: Any, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], Any]]:
    """Yield the modules below a node with their paths, each before those in it."""
    if _is_module(node):
        yield path, node
        children: list[tuple[Any, Any]] = [
            (x.name, getattr(node, x.name, None)) for x in dataclasses.fields(node)
        ]
    elif isinstance(node, Mapping):
        children = list(node.items())
    else:
        children = list(enumerate(node)) if isinstance(node, list | tuple) else []
    for name, child in children:
        yield from _iterate_modules(child, (*path, str(name)))


def _state_leaves(state: PyTree) -> dict[str, Any]:
    """Return the arrays in an `eqx.nn.State`, or in another tree, by path:
    `norm.batch_state_index.0`.
    """
    leaves = paths.flatten(state)
    if not _is_state(state):
        return leaves
    # JAX only knows the number of an entry. Its key is the path of the layer,
    # `Net.layers[0].batch_counter`, with the class of the model.
    treedef: Any = jax.tree.structure(state)
    _, markers = treedef.node_data()
    # `Net.layers[0].bn` becomes `layers.0.bn`: checkpoints must not depend on the class name.
    names = [
        re.sub(r"\[['\"]?(.*?)['\"]?\]", r".\1", str(marker)).partition(".")[2]
        for marker in markers
    ]
    if not all(names) or len(set(names)) < len(names):  # before Equinox 0.13 the keys were numbers
        return leaves
    heads = {path: path.partition(".") for path in leaves}
    return {
        ".".join(filter(None, (names[int(head)], rest))): leaves[path]
        for path, (head, _, rest) in heads.items()
    }
