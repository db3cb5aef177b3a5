"""Define the state of an optimizer wrapper, and the accumulation of gradients in it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim.core import Tree, state_dtype
from jengine.optim.loss_scale import LossScaleState


class OptState(NamedTuple):
    """Hold the state of an optimizer wrapper; part of the train state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    inner: Any  # the optimizer's state, float32; nothing for frozen parameters
    accumulated_grads: Tree  # float32, like the trainable parameters; None without accumulation
    loss_scale: LossScaleState | None  # None without loss scaling
    metrics: dict[str, jax.Array]  # float32[], metrics of the last update for the log
    num_accumulated: jax.Array | None  # int32[], iterations in accumulated_grads, invalid at 0; None without
    weight_sum: jax.Array | None  # float32[], sum of the weights in accumulated_grads; None without accumulation


def scale_by_weight(grads: Tree, weight: jax.Array | None) -> Tree:
    """Return the gradients times their weight."""
    if weight is None:
        return grads
    return jax.tree.map(lambda g: g.astype(state_dtype(g.dtype)) * weight, grads)


def add_to_weight_sum(opt_state: OptState, weight: jax.Array | None) -> jax.Array:
    """Return the sum of the weights of the window so far and `weight`, float32[]."""
    assert opt_state.weight_sum is not None
    return jnp.where(opt_state.num_accumulated == 0, 0, opt_state.weight_sum) + (1 if weight is None else weight)


def add_to_accumulator(opt_state: OptState, grads: Tree) -> Tree:
    """Return the sum of the gradients of the window so far and `grads`."""
    is_first = opt_state.num_accumulated == 0
    return jax.tree.map(lambda a, g: jnp.where(is_first, 0, a) + g.astype(a.dtype), opt_state.accumulated_grads, grads)
