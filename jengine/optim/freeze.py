"""Parameters that are frozen for a while, by a flag that is data, so that freezing and releasing compile nothing anew.

A hyperparam called `frozen:PATTERN` that is not 0 freezes the parameters whose path contains PATTERN: their gradients
count as zero, also for the norm that clips, their updates are zero, and their part of the optimizer state stays as it
is, as in PyTorch for parameters without a gradient. (The count of steps, which all parameters share, goes on.)
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jengine import paths
from jengine.optim.core import Tree
from jengine.optim.param_group import Layout

PREFIX = "frozen:"


def flags(layout: Layout, hyperparams: Mapping[str, Any]) -> list[Any] | None:
    """For each leaf whether it is frozen, bool[], None where no pattern matches; None if there is no pattern at all."""
    patterns = [name for name in hyperparams if name.startswith(PREFIX)]
    if not patterns:
        return None
    out: list[Any] = []
    for path in layout.paths:
        flag = None
        for name in patterns:
            if any(name.removeprefix(PREFIX) in spelling for spelling in paths.spellings(path)):
                on = jnp.asarray(hyperparams[name]) != 0
                flag = on if flag is None else flag | on
        out.append(flag)
    return out


def mask(tree: Tree, flags: list[Any]) -> Tree:
    """`tree`, a tree over the parameters with None at untrained leaves, with zeros at frozen leaves."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    treedef: Any = jax.tree.structure(tree, is_leaf=lambda x: x is None)
    return treedef.unflatten([_where(flag, jnp.zeros_like(x), x) for x, flag in zip(leaves, flags, strict=True)])


def hold(layout: Layout, flags: list[Any], old: Any, new: Any) -> Any:
    """An optimizer state that is `old` for frozen parameters and `new` for the others.

    Whatever part of the state is structured as the parameters, or as those of one group, belongs to them leaf by leaf.
    """
    groups = {group for group in layout.groups if group is not None and not isinstance(group, tuple)}
    selections = [[group is not None for group in layout.groups]]
    selections += [[group == own for group in layout.groups] for own in sorted(groups)]
    of_structure: dict[Any, list[Any]] = {}
    for chosen in selections:
        structure = jax.tree.structure(layout.treedef.unflatten([0 if c else None for c in chosen]))
        of_structure.setdefault(structure, [f for f, c in zip(flags, chosen, strict=True) if c])

    def part(before: Any, after: Any) -> Any:
        """A part of the optimizer state, as it was before where the parameters are frozen."""
        own = of_structure.get(jax.tree.structure(before))
        if own is None:
            return after
        treedef: Any = jax.tree.structure(before)
        rows = zip(own, jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        return treedef.unflatten([_where(flag, b, a) for flag, b, a in rows])

    return jax.tree.map(part, old, new, is_leaf=lambda x: jax.tree.structure(x) in of_structure)


def _where(flag: Any, frozen: Any, moving: Any) -> Any:
    return moving if flag is None or moving is None else jnp.where(flag, frozen, moving)
