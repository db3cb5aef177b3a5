"""What an optimizer wrapper carries through training, and the sums of gradients in it that wait for an update."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim.core import Tree, state_dtype
from jengine.optim.loss_scale import LossScaleState


class OptState(NamedTuple):
    """What an optimizer wrapper carries through training; part of the train state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    inner: Any  # the optimizer's state, float32; nothing for frozen parameters
    acc: Tree  # float32, like the trainable parameters: summed gradients, if pending; None without accumulation
    loss_scale: LossScaleState | None  # None without loss scaling
    metrics: dict[str, jax.Array]  # float32[], what the last update reports for the log
    pending: jax.Array | None  # int32[], iterations summed in acc, which counts for nothing at 0; None without
    weight: jax.Array | None  # float32[], the weights of what is summed in acc; None without accumulation


def weighted(grads: Tree, weight: jax.Array | None) -> Tree:
    """The gradients times their weight."""
    if weight is None:
        return grads
    return jax.tree.map(lambda g: g.astype(state_dtype(g.dtype)) * weight, grads)


def total(opt_state: OptState, weight: jax.Array | None) -> jax.Array:
    """The weights of the window so far and `weight`, float32[]."""
    assert opt_state.weight is not None
    return jnp.where(opt_state.pending == 0, 0, opt_state.weight) + (1 if weight is None else weight)


def added(opt_state: OptState, grads: Tree) -> Tree:
    """The gradients of the window so far and `grads`."""
    fresh = opt_state.pending == 0
    return jax.tree.map(lambda a, g: jnp.where(fresh, 0, a) + g.astype(a.dtype), opt_state.acc, grads)
