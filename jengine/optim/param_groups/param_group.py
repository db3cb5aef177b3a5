"""Parameter groups: the settings that they share, and the group of each parameter.

A leaf belongs to one group, or to one group for each index along the first axis (layers stacked by
`nn.scan`), or to no group: then it is frozen. Frozen leaves are None in the trees that the chain
receives, so they have no state.
"""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jengine.config import paths

# a leaf's group; its groups by index along the first axis; None if frozen
Membership: TypeAlias = int | tuple[int, ...] | None


class ParamGroup(dict[str, Any]):
    """Settings that some parameters share: lr, weight_decay, momentum or betas, eps, and any extra
    key.

    Attributes:
      paths: dotted parameter paths, `path[i]` for one layer of a stacked parameter; None for a
        group with all parameters until they are known.
      patterns: the config keys that define the group.
    """

    def __init__(
        self,
        settings: Mapping[str, Any],
        paths: Sequence[str] | None = None,
        patterns: Iterable[str] = (),
    ) -> None:
        super().__init__(settings)
        self.paths = None if paths is None else list(paths)
        self.patterns = tuple(patterns)


def get_momentum(group: Mapping[str, Any]) -> float:
    """Return a group's momentum: the first of `betas`, else `momentum`, else `b1`, else 0.

    >>> get_momentum({"betas": (0.9, 0.999)}), get_momentum({"lr": 0.1})
    (0.9, 0.0)
    """
    if "betas" in group:
        # MMEngine logs this as the momentum of Adam.
        return group["betas"][0]
    return group.get("momentum", group.get("b1")) or 0.0


@dataclasses.dataclass(frozen=True)
class GroupLayout:
    """The group of each leaf in a parameter tree.

    Attributes:
      treedef: tree structure of the parameters.
      paths: dotted path of each leaf.
      groups: the group, or groups, of each leaf.
      stacked: the axes of each leaf along which layers are stacked, as far as they are known.
    """

    treedef: Any
    paths: tuple[str, ...]
    groups: tuple[Membership, ...]
    stacked: tuple[tuple[int, ...], ...]

    def trainable(self, tree: Any) -> Any:
        """Return `tree` with None for every frozen leaf."""
        leaves = self.flatten(tree)
        return self.treedef.unflatten(
            [x if g is not None else None for x, g in zip(leaves, self.groups, strict=True)]
        )

    def combine(self, tree: Any, other: Any) -> Any:
        """Return `tree` with the leaves of `other` where it has None."""
        pairs = zip(self.flatten(tree), self.flatten(other), strict=True)
        return self.treedef.unflatten([b if a is None else a for a, b in pairs])

    def flatten(self, tree: Any) -> list[Any]:
        """Return the leaves, including None for each missing frozen leaf.

        Raise ValueError for another structure.
        """
        # Not `jax.tree.leaves`, which drops None: positions would no longer be those of the paths.
        return self.treedef.flatten_up_to(tree)

    def select(self, tree: Any, groups: Sequence[int]) -> Any:
        """Return `tree` with None for each leaf that is not in one of `groups`."""
        # The layers of a stack are in one chain (`check_stacked`), so that the first tells it.
        first = [group[0] if isinstance(group, tuple) else group for group in self.groups]
        pairs = zip(self.flatten(tree), first, strict=True)
        return self.treedef.unflatten([leaf if group in groups else None for leaf, group in pairs])

    def broadcast(self, hyperparams: Mapping[str, jax.Array], like: Any) -> dict[str, Any]:
        """Return the hyperparameters of each leaf.

        Args:
          hyperparams: by name float[] for all leaves, or float[G].
          like: the parameters; a stacked one gets a vector along the first axis, shaped to
            broadcast.

        Returns:
          By name the value itself if it is a scalar, else a tree of scalars and vectors, None for
          frozen leaves.
        """
        # Python runs over leaves and groups while tracing; what remains in the program is a scalar
        # for each leaf.
        members = list(zip(self.flatten(like), self.groups, strict=True))

        def for_leaves(values: jax.Array | list[jax.Array]) -> jax.Array | Any:
            if not isinstance(values, list):
                return values
            return self.treedef.unflatten([_value_for_leaf(*member, values) for member in members])

        return {name: for_leaves(values) for name, values in _unstack_groups(hyperparams).items()}

    def check_stacked(self, chains: Sequence[Sequence[int]], optimizer: Any) -> None:
        """Raise ValueError if a tensor's layers are in groups that the `Optimizer` and its
        chains do not support.
        """
        for path, group in zip(self.paths, self.groups, strict=True):
            if not isinstance(group, tuple):
                continue
            # A norm or a factorization mixes the layers of a stack: its result for one layer would
            # depend on the others' settings.
            if optimizer.whole_tensor:
                raise ValueError(
                    f"{optimizer.name} updates whole tensors, so the stacked layers of {path!r} "
                    "must be in one group"
                )
            if not any(set(group) <= set(chain) for chain in chains):
                raise ValueError(
                    f"the groups of the stacked layers of {path!r} must differ only in lr and "
                    "weight_decay: "
                    f"{optimizer.name} cannot apply other settings to parts of a tensor"
                )


def assign_groups(
    params: Any,
    members: Sequence[Sequence[str] | None],
    stacked: Mapping[str, tuple[int, ...]],
) -> GroupLayout:
    """Find the group of every leaf.

    Args:
      params: pytree of floating arrays or ShapeDtypeStructs; frozen leaves may have any dtype.
      members: the paths in each group, None for all; a module path includes all parameters below
        it. Paths may be missing in a partial tree, as `optax.masked` and `optax.partition` pass it.
      stacked: the axes along which layers are stacked by path, as far as they are known.

    Raises:
      ValueError: a path without a parameter, or a parameter in two groups.
      TypeError: a trainable leaf that is not floating.
    """
    leaves = paths.flatten(params)
    treedef: Any = jax.tree_util.tree_structure(params)
    if len(leaves) != treedef.num_leaves:
        raise ValueError("two parameters have the same dotted path: keys must not contain dots")
    # A path that no group adds stays out of it: the parameter is frozen.
    member: dict[str, Any] = {}
    # optax.masked and optax.partition leave out parameters, so that a missing path is no typo
    is_partial = not leaves or any(
        _is_masked(node) for node in jax.tree.leaves(params, is_leaf=_is_masked)
    )
    for index, group_paths in enumerate(members):
        for group_path in leaves if group_paths is None else group_paths:
            for path, layer in _find_leaves(group_path, leaves, is_partial):
                _assign(member, path, layer, index, leaves[path])
    for path, leaf in leaves.items():
        if path in member and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameter {path!r} must have a floating dtype to be trained, got {leaf.dtype}; "
                "freeze it with custom_keys={..: dict(requires_grad=False)}, or train the real and "
                "imaginary parts"
            )
        if isinstance(member.get(path), list):
            if None in member[path]:
                missing = [i for i, group in enumerate(member[path]) if group is None]
                raise ValueError(
                    f"all layers of {path!r} must have a group, got none for layers {missing}"
                )
            # a scalar for the whole tensor is cheaper than a vector along its first axis
            member[path] = member[path][0] if len(set(member[path])) == 1 else tuple(member[path])
    groups = tuple(member.get(path) for path in leaves)
    axes = [
        stacked.get(path, ()) or ((0,) if isinstance(group, tuple) else ())
        for path, group in zip(leaves, groups, strict=True)
    ]
    return GroupLayout(treedef, tuple(leaves), groups, tuple(axes))


def _unstack_groups(hyperparams: Mapping[str, jax.Array]) -> dict[str, Any]:
    """Return the hyperparameters with vectors as lists of scalars."""

    def unstack(vectors: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
        return {name: list(jnp.unstack(vector)) for name, vector in vectors.items()}

    def unstack_in_branch(vectors: dict[str, jax.Array]) -> dict[str, list[jax.Array]]:
        # XLA for CPUs does not fuse slices across a branch. Fused with its slice, each group's
        # update would be a separate kernel to compile, and the compile time would grow with the
        # number of groups.
        first = next(iter(vectors.values()))[0]
        return jax.lax.cond(first == first, unstack, unstack, vectors)

    vectors = {name: values for name, values in hyperparams.items() if values.ndim}
    if not vectors:
        return dict(hyperparams)
    return {
        **hyperparams,
        **jax.lax.platform_dependent(vectors, cpu=unstack_in_branch, default=unstack),
    }


def _value_for_leaf(
    leaf: jax.Array, group: Membership, scalars: Sequence[jax.Array]
) -> jax.Array | None:
    """Return the scalar for a leaf's group, a broadcastable vector for a stacked leaf, None for
    a frozen one.
    """
    if group is None:
        return None
    if isinstance(group, tuple):
        vector = jnp.stack([scalars[g] for g in group])
        # Layers are along the first axis, but broadcasting aligns the last ones.
        return vector.reshape(vector.shape + (1,) * (len(leaf.shape) - 1))
    return scalars[group]


def _is_masked(node: object) -> bool:
    return isinstance(node, optax.MaskedNode)


def _find_leaves(
    path: str, leaves: Mapping[str, Any], is_partial: bool
) -> list[tuple[str, int | None]]:
    """Return the leaves, and the layers of stacked ones, at the path of a parameter, a layer or
    a module.
    """
    if path in leaves:
        return [(path, None)]
    # A parameter itself may have such a name, so this comes second.
    layer = re.fullmatch(r"(.*)\[(\d+)\]", path)
    if layer and layer[1] in leaves:
        return [(layer[1], int(layer[2]))]
    below: list[tuple[str, int | None]] = [(p, None) for p in leaves if p.startswith(f"{path}.")]
    if not below and not is_partial:
        raise ValueError(
            f"`params` of a parameter group must be paths of parameters or modules, got {path!r}"
            f"{paths.closest_paths(path, leaves)}"
        )
    return below


def _assign(
    member: dict[str, Any], path: str, layer: int | None, group: int, leaf: jax.Array
) -> None:
    if layer is None:
        if path in member:
            raise ValueError(
                f"parameter {path!r} must be in one group, got {member[path]} and {group}"
            )
        member[path] = group
        return
    # A layer at a time: the groups come in the order of the config, each with some layers of the
    # stack.
    layers = member.setdefault(path, [None] * leaf.shape[0])
    if not isinstance(layers, list) or layers[layer] is not None:
        raise ValueError(
            f"layer {layer} of parameter {path!r} must be in one group, got {group} and another"
        )
    layers[layer] = group
