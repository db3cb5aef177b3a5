"""Freezing and resetting of a part of the optimizer: what other leaves have is kept.

Freezing is temporary, by a flag passed as data, so that freezing and unfreezing never recompile.

A hyperparameter called `frozen:PATTERN` that is not 0 freezes the parameters whose path contains
PATTERN: gradients count as zero, including in the norm for clipping, updates are zero, and the
optimizer state does not change, as in PyTorch for parameters without a gradient. (The step count,
which all parameters share, continues.)
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.typing import ArrayLike
from optax import OptState, Updates

from jengine.config import paths
from jengine.config.errors import closest
from jengine.optim.param_groups.grouped import FROZEN, GroupHyperparamsState
from jengine.optim.param_groups.param_group import GroupLayout
from jengine.optim.transforms.accumulate import AccumulateState
from jengine.optim.transforms.loss_scale import LossScaleState
from jengine.optim.wrapper import OptimWrapper

# bool[] of each leaf, None for one that no pattern matches
Flags: TypeAlias = list[jax.Array | None]


def frozen_flags(layout: GroupLayout, hyperparams: Mapping[str, Any]) -> Flags:
    """Return for each leaf whether it is frozen, bool[], None if no pattern matches."""
    names = [name for name in hyperparams if name.startswith(FROZEN)]
    flags: Flags = [None] * len(layout.paths)
    for name in names:
        # `!= 0` on the device: the value may change between steps, the pattern is part of the
        # program.
        pattern = name.removeprefix(FROZEN)
        is_frozen = jnp.asarray(hyperparams[name]) != 0
        matches = [
            any(pattern in alias for alias in paths.path_aliases(path)) for path in layout.paths
        ]
        if not any(matches):
            raise ValueError(
                f"hyperparams[{name!r}] must have a part of a parameter path after the colon, got "
                f"{pattern!r}{closest(pattern, layout.paths)}"
            )
        for i, (old, is_match) in enumerate(zip(flags, matches, strict=True)):
            if is_match:
                # Several patterns may match a leaf; one of them is enough to freeze it.
                flags[i] = is_frozen if old is None else old | is_frozen
    return flags


def skip_frozen(
    inner: optax.GradientTransformationExtraArgs,
    layout: GroupLayout,
    hyperparams: Mapping[str, Any],
    chains: Sequence[Sequence[int]],
) -> optax.GradientTransformationExtraArgs:
    """Return `inner` without effect on leaves with a frozen flag: zero gradients, zero updates
    and unchanged state.
    """
    flags = frozen_flags(layout, hyperparams)

    def update(
        grads: Updates, state: OptState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        # Before clipping, so that frozen parameters do not count in the norm.
        updates, new_state = inner.update(_zero_frozen(grads, flags), state, params, **extra)
        return _zero_frozen(updates, flags), select_state(layout, flags, chains, state, new_state)

    return optax.GradientTransformationExtraArgs(inner.init, update)


def select_state(
    layout: GroupLayout, flags: Flags, chains: Sequence[Sequence[int]], old: OptState, new: OptState
) -> OptState:
    """Return an optimizer state with `old` for leaves with a flag and `new` for the others.

    Each part of the state that has the structure of all parameters, or of one chain's, belongs to
    them leaf by leaf.
    """
    # What is outside the chains, such as accumulated gradients, has the structure of all
    # parameters.
    everything = sorted({group for chain in chains for group in chain})
    flags_by_structure: dict[Any, list[Any]] = {}
    # leaves that tell which flag is theirs
    indices = layout.treedef.unflatten(range(len(layout.paths)))
    for groups in (everything, *chains):
        members = layout.select(indices, groups)
        flags_by_structure.setdefault(
            jax.tree.structure(members), [flags[i] for i in jax.tree.leaves(members)]
        )

    def select(old_part: OptState, new_part: OptState) -> OptState:
        """Select the leaves of one part of the optimizer state."""
        treedef: Any = jax.tree.structure(old_part)
        own_flags = flags_by_structure.get(treedef)
        if own_flags is None:  # a count or another value that all parameters share
            return new_part
        leaves = zip(own_flags, jax.tree.leaves(old_part), jax.tree.leaves(new_part), strict=True)
        return treedef.unflatten([_where(flag, a, b) for flag, a, b in leaves])

    return jax.tree.map(
        select, old, new, is_leaf=lambda x: jax.tree.structure(x) in flags_by_structure
    )


def _zero_frozen(tree: Any, flags: Flags) -> Any:
    """Return `tree`, like the parameters with None for untrained leaves, with zeros for frozen
    leaves.
    """
    leaves, treedef = jax.tree.flatten(tree, is_leaf=lambda x: x is None)
    return jax.tree.unflatten(
        treedef, [_where(flag, 0, x) for x, flag in zip(leaves, flags, strict=True)]
    )


def _where(
    flag: jax.Array | None, frozen: ArrayLike, trained: jax.Array | None
) -> jax.Array | None:
    # No pattern means no `where` in the program for this leaf.
    if flag is None or trained is None:
        return trained
    # A flag for each layer of a stacked parameter is along the first axis
    return jnp.where(
        jnp.reshape(flag, jnp.shape(flag) + (1,) * (jnp.ndim(trained) - jnp.ndim(flag))),
        frozen,
        trained,
    )


def reset_state(
    wrapper: OptimWrapper, opt_state: OptState, params: Any, groups: Sequence[int] | None = None
) -> OptState:
    """Return a state in which the optimizer starts anew, with zero moments and step count.

    The loss scale and the gradients of an unfinished accumulation window stay.

    Args:
      wrapper, opt_state, params: the optimizer, its state, and the parameters.
      groups: the parameter groups that start anew; None for all. The step count, which all
        groups of an optimizer share, is kept for some: the bias correction of Adam then takes
        the new moments for old ones, so that the first updates may be larger.
    """
    layout = wrapper.grouped.layout(params)

    def reset(old: Any, new: Any) -> Any:
        if isinstance(old, GroupHyperparamsState | AccumulateState | LossScaleState):
            return old._replace(inner_state=reset(old.inner_state, new.inner_state))
        if groups is None:
            return new
        flags: list[Any] = []
        for member in layout.groups:
            if isinstance(member, tuple):  # layers along the first axis
                flags.append(np.array([group in groups for group in member]))
            else:
                flags.append(True if member in groups else None)
        # What the other groups have, and what all share, is the current one
        return select_state(layout, flags, wrapper.grouped.chains, new, old)

    return reset(opt_state, wrapper.tx.init(params))


def restrict_to_trainable(
    extra: Mapping[str, Any], layout: GroupLayout, params: Any
) -> dict[str, Any]:
    """Return the extra arguments of an update, with what depends on parameters for the trainable
    ones only.
    """
    restricted = dict(extra)
    if "grad" in extra and jax.tree.structure(extra["grad"]) == layout.treedef:
        restricted["grad"] = layout.trainable(extra["grad"])

    def restrict(value_fn: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(value_fn)  # line searches read the signature
        def evaluate(trainable: Any, *args: Any, **kwargs: Any) -> Any:
            return value_fn(layout.combine(trainable, params), *args, **kwargs)

        return evaluate

    names = [name for name in ("value_fn", "obj_fn") if extra.get(name) is not None]
    restricted |= {name: restrict(extra[name]) for name in names}
    if (grad_fn := extra.get("grad_fn")) is not None:

        def differentiate(trainable: Any, *args: Any) -> Updates:
            return layout.trainable(grad_fn(layout.combine(trainable, params), *args))

        restricted["grad_fn"] = differentiate
    return restricted
