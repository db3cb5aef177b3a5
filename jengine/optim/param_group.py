"""Parameter groups: the numbers that the host owns, and which parameter belongs to which.

A leaf belongs to one group, or to one group for each index along its first axis (layers stacked by `nn.scan`), or to
none: then it is frozen. Frozen leaves are None in the trees that the optimizer core sees, so they hold no state.
"""

import dataclasses
import difflib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np

from jengine import paths

Tree: TypeAlias = Any
Numbers: TypeAlias = Callable[[Mapping[str, Any]], dict[str, float]]  # the settings of a group -> its hyperparams
# the group of a leaf; of each index along its first axis; None when frozen
Membership: TypeAlias = int | tuple[int, ...] | None

VECTOR_LIMIT = 64  # beyond it, groups travel as a list of scalars: compile time grows with the distinct indices


class ParamGroup(dict[str, Any]):
    """The settings that some parameters share: lr, weight_decay, momentum or betas, eps, and any extra key.

    Attributes:
      paths: dotted paths of its parameters, `path[i]` for one layer of a stacked parameter; None until the
        parameters are known, when the group is the only one.
      patterns: the config keys that made it.
    """

    def __init__(
        self, settings: Mapping[str, Any], paths: Sequence[str] | None = None, patterns: Iterable[str] = ()
    ) -> None:
        super().__init__(settings)
        self.paths = None if paths is None else list(paths)
        self.patterns = tuple(patterns)


@dataclasses.dataclass(frozen=True)
class Layout:
    """Which group each leaf of one parameter tree belongs to.

    Attributes:
      treedef: the structure of the parameters.
      paths: dotted path of each leaf.
      groups: the group, or groups, of each leaf.
    """

    treedef: Any
    paths: tuple[str, ...]
    groups: tuple[Membership, ...]

    def trainable(self, tree: Tree) -> Tree:
        """`tree` with None in the place of every frozen leaf."""
        leaves = self.flatten(tree)
        return self.treedef.unflatten([x if g is not None else None for x, g in zip(leaves, self.groups, strict=True)])

    def fill(self, tree: Tree, frozen: Tree) -> Tree:
        """The whole tree again: leaves of `tree`, and those of `frozen` where that one is None."""
        mine, other = self.flatten(tree), self.flatten(frozen)
        return self.treedef.unflatten([b if a is None else a for a, b in zip(mine, other, strict=True)])

    def flatten(self, tree: Tree) -> list[Any]:
        """The leaves of `tree`, a None for each frozen one that it leaves out.

        Raises:
          ValueError: its structure is not that of the parameters.
        """
        try:
            return self.treedef.flatten_up_to(tree)
        except (ValueError, TypeError) as error:
            raise ValueError(f"a tree does not have the structure of the parameters: {error}") from None

    def spread(self, hyperparams: Mapping[str, Any], names: Iterable[str], shapes: Tree) -> dict[str, Tree]:
        """Hands each leaf the numbers of its group.

        Args:
          hyperparams: name -> float[G], or a list of G scalars; float[1] where all groups have one number.
          names: the hyperparams wanted.
          shapes: the parameters; a stacked one gets a vector along its first axis, shaped to broadcast.

        Returns:
          For each name a tree of scalars, None for frozen leaves.

        Raises:
          KeyError: a name is missing.
        """
        leaves = self.flatten(shapes)
        out = {}
        for name in names:
            if name not in hyperparams:
                raise KeyError(
                    f"the hyperparams have no {name!r}, found {sorted(hyperparams)}; pass wrapper.hyperparams"
                )
            values = hyperparams[name]
            scalars = list(values) if isinstance(values, list | tuple) else list(jnp.unstack(jnp.asarray(values)))
            numbers = [_number_of(leaf, group, scalars) for leaf, group in zip(leaves, self.groups, strict=True)]
            out[name] = self.treedef.unflatten(numbers)
        return out


def _number_of(leaf: Any, group: Membership, scalars: Sequence[Any]) -> Any:
    """The scalar of a leaf's group, a broadcastable vector for a leaf whose layers are in several, None if frozen."""
    if group is None:
        return None
    if len(scalars) == 1:
        return scalars[0]
    if isinstance(group, tuple):
        vector = jnp.stack([scalars[g] for g in group])
        return vector.reshape(vector.shape + (1,) * (len(leaf.shape) - 1))
    return scalars[group]


def bind(params: Tree, groups: Sequence[ParamGroup]) -> Layout:
    """Finds the group of every leaf.

    Args:
      params: pytree of floating arrays or ShapeDtypeStructs; frozen leaves may have any dtype.
      groups: their `paths` are resolved here: a module path stands for everything below it.

    Raises:
      ValueError: a path that is none of the parameters', or a parameter in two groups.
      TypeError: a trainable leaf that is not floating.
    """
    leaves = paths.flatten(params)
    treedef: Any = jax.tree_util.tree_structure(params)
    if len(leaves) != treedef.num_leaves:
        raise ValueError("two parameters have the same dotted path: keys must not contain dots")
    member: dict[str, Any] = {}
    for index, group in enumerate(groups):
        for path in leaves if group.paths is None else group.paths:
            for found, layer in _resolve(path, leaves):
                _join(member, found, layer, index, leaves[found])
    for path, leaf in leaves.items():
        if path in member and not jnp.issubdtype(leaf.dtype, jnp.floating):
            raise TypeError(
                f"parameter {path!r} has dtype {leaf.dtype}: only floating parameters can be optimized; keep it in the "
                "model state, or freeze it with custom_keys={..: dict(requires_grad=False)}"
            )
        if isinstance(member.get(path), list):
            if None in member[path]:
                raise ValueError(
                    f"layers {[i for i, g in enumerate(member[path]) if g is None]} of {path!r} have no group"
                )
            member[path] = member[path][0] if len(set(member[path])) == 1 else tuple(member[path])
    return Layout(treedef, tuple(leaves), tuple(member.get(path) for path in leaves))


def _resolve(path: str, leaves: Mapping[str, Any]) -> list[tuple[str, int | None]]:
    if path in leaves:
        return [(path, None)]
    layer = re.fullmatch(r"(.*)\[(\d+)\]", path)
    if layer and layer[1] in leaves:
        return [(layer[1], int(layer[2]))]
    below: list[tuple[str, int | None]] = [(p, None) for p in leaves if p.startswith(f"{path}.")]
    if not below:
        raise ValueError(f"no parameter is called {path!r} or lies below it{did_you_mean(path, leaves)}")
    return below


def _join(member: dict[str, Any], path: str, layer: int | None, group: int, leaf: Any) -> None:
    if layer is None:
        if path in member:
            raise ValueError(f"parameter {path!r} is in two groups, {member[path]} and {group}")
        member[path] = group
        return
    layers = member.setdefault(path, [None] * leaf.shape[0])
    if not isinstance(layers, list) or layers[layer] is not None:
        raise ValueError(f"layer {layer} of parameter {path!r} is in two groups, one of them {group}")
    layers[layer] = group


def did_you_mean(path: str, candidates: Iterable[str]) -> str:
    """'; closest: ...' with up to three of `candidates` or of the modules that hold them; empty when none is near."""
    names: dict[str, None] = {}
    for candidate in candidates:
        parts = candidate.split(".")
        names.update(dict.fromkeys(".".join(parts[:n]) for n in range(1, len(parts) + 1)))
    close = difflib.get_close_matches(path, names, n=3, cutoff=0.5)
    return f"; closest: {', '.join(close)}" if close else ""


def shared_names(groups: Sequence[Mapping[str, Any]], numbers: Numbers) -> frozenset[str]:
    """The hyperparams that all groups have alike, lr and weight decay apart: one number serves all groups.

    Schedules move such a number in all groups alike, so it stays one; the program has fewer inputs and, with its
    fusions no longer different from group to group, compiles faster.
    """
    rows = [numbers(group) for group in groups]
    return frozenset(k for k in rows[0] if k not in ("lr", "weight_decay") and len({row[k] for row in rows}) == 1)


def group_numbers(
    groups: Sequence[Mapping[str, Any]],
    numbers: Numbers,
    shared: frozenset[str],
    dtype: Any,
    kept: dict[str, tuple[list[float], Any]],
) -> dict[str, Any]:
    """The hyperparams of all groups as the step takes them.

    Args:
      groups: the groups.
      numbers: the hyperparams of a group by name.
      shared: those that were alike in all groups at first; while they are, one number stands for all.
      dtype: of the numbers.
      kept: what was returned last with the values that it is of, by name; a value that has not changed is the same
        array again.

    Returns:
      Name -> float[G], or a list of G scalars if G is large; float[1] for a shared one.
    """
    rows = [numbers(group) for group in groups]
    out: dict[str, Any] = {}
    if len(rows) == 1:
        for name, value in rows[0].items():
            entry = kept.get(name)
            if entry is None or entry[0][0] != value:
                array = np.array([value], dtype)
                if entry is not None and entry[1][0] == array[0]:
                    array = entry[1]  # what has changed is less than the dtype tells apart
                array.setflags(write=False)  # the same array is returned again
                entry = kept[name] = [value], array
            out[name] = entry[1]
        return out
    for name in rows[0]:
        values = [row[name] for row in rows]
        if name in kept and kept[name][0] == values:
            out[name] = kept[name][1]
            continue
        if name in shared and values.count(values[0]) == len(values):
            out[name] = np.array(values[:1], dtype)
        elif len(values) <= VECTOR_LIMIT:
            out[name] = np.array(values, dtype)
        else:
            out[name] = [np.asarray(value, dtype) for value in values]
        kept[name] = values, out[name]
    return out
