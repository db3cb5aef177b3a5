"""Freeze parameters temporarily by a flag that is data, so that freezing and releasing never compile again.

A hyperparam called `frozen:PATTERN` that is not 0 freezes the parameters whose path contains PATTERN: their gradients
count as zero, also for the norm that clips, their updates are zero, and their part of the optimizer state stays as it
is, as in PyTorch for parameters without a gradient. (The count of steps, which all parameters share, goes on.)
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine import paths
from jengine.optim.optimizers.common import Tree
from jengine.optim.param_groups.param_group import Layout

PREFIX = "frozen:"


def flags(layout: Layout, hyperparams: Mapping[str, Any]) -> list[Any] | None:
    """Return for each leaf whether it is frozen, bool[], None where no pattern matches; None without any pattern."""
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
    """Return `tree`, like the parameters with None for untrained leaves, with zeros for frozen leaves."""
    leaves = jax.tree.leaves(tree, is_leaf=lambda x: x is None)
    treedef: Any = jax.tree.structure(tree, is_leaf=lambda x: x is None)
    return treedef.unflatten([_where(flag, jnp.zeros_like(x), x) for x, flag in zip(leaves, flags, strict=True)])


def hold_frozen(
    inner: optax.GradientTransformationExtraArgs, layout: Layout, flags: list[Any], chains: Sequence[Sequence[int]]
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` without effect on frozen parameters: zero gradients and updates, and state that stays.

    Args:
      inner: a transformation of the trainable parameters.
      layout: the groups of the parameters.
      flags: for each leaf whether it is frozen, see `flags`.
      chains: the groups that share a chain.
    """

    def update(grads: Tree, state: Any, params: Tree = None, **extra: Any) -> tuple[Tree, Any]:
        updates, new_state = inner.update(mask(grads, flags), state, params, **extra)
        return mask(updates, flags), hold(layout, flags, chains, state, new_state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def hold(layout: Layout, flags: list[Any], chains: Sequence[Sequence[int]], old: Any, new: Any) -> Any:
    """Return an optimizer state that is `old` for frozen parameters and `new` for the others.

    Each part of the state that is structured as the parameters, or as those of one chain, belongs to them leaf by leaf.
    """
    everything = sorted({group for chain in chains for group in chain})
    of_structure: dict[Any, list[Any]] = {}
    indices = layout.treedef.unflatten(range(len(layout.paths)))
    for chosen in (everything, *chains):
        members = layout.part(indices, chosen)
        of_structure.setdefault(jax.tree.structure(members), [flags[i] for i in jax.tree.leaves(members)])

    def part(before: Any, after: Any) -> Any:
        """Return a part of the optimizer state, as it was before where the parameters are frozen."""
        own = of_structure.get(jax.tree.structure(before))
        if own is None:
            return after
        treedef: Any = jax.tree.structure(before)
        rows = zip(own, jax.tree.leaves(before), jax.tree.leaves(after), strict=True)
        return treedef.unflatten([_where(flag, b, a) for flag, b, a in rows])

    return jax.tree.map(part, old, new, is_leaf=lambda x: jax.tree.structure(x) in of_structure)


def _where(flag: Any, frozen: Any, moving: Any) -> Any:
    return moving if flag is None or moving is None else jnp.where(flag, frozen, moving)
