"""Provide what the optimizers share: moving averages, and the ends of their chains."""

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
import optax

from jengine.optim.transforms import add_decayed_weights_by_rule, scale_by_group_learning_rate

Tree: TypeAlias = Any  # a pytree of arrays with the structure of the parameters
Parts: TypeAlias = Sequence[tuple[str, optax.GradientTransformation]]


def state_dtype(dtype: Any) -> Any:
    """Return the dtype of state that belongs to a parameter: float32, or the parameter's own if that is wider."""
    return jnp.promote_types(jnp.float32, dtype)


def wide(tree: Tree) -> Tree:
    """Return `tree` in float32, or wider where it is."""
    return jax.tree.map(lambda x: jnp.asarray(x, state_dtype(x.dtype)), tree)


def strongly_typed(tree: Tree) -> Tree:
    """Return the arrays without weak types, which come from Python numbers (`jnp.full(3, 0.5)`).

    Args:
      tree: arrays; keys and strongly typed arrays are passed through.
    """
    return jax.tree.map(lambda x: jnp.asarray(x, x.dtype) if getattr(x, "weak_type", False) else x, tree)


def zeros_like(tree: Tree) -> Tree:
    """Return zeros for the state of an optimizer: shapes and shardings of `tree`, at least float32."""
    return jax.tree.map(lambda x: jnp.zeros_like(x, dtype=state_dtype(x.dtype)), tree)


def step_zero() -> jax.Array:
    """Return the count of updates before the first, int32[]."""
    return jnp.zeros((), jnp.int32)


def bias_correction(beta: Any, count: jax.Array) -> jax.Array:
    """Return `1 - beta**count`, accurate in float32 where the plain formula loses five digits.

    Args:
      beta: decay, float32[], or a float.
      count: the number of this update, from 1, int32[].
    """
    log = math.log(beta) if isinstance(beta, float) else jnp.log(beta)
    return -jnp.expm1(count.astype(jnp.result_type(jnp.float32, beta)) * log)


def moving_average(previous: Tree, beta: Any, new: Tree) -> Tree:
    """Return the exponential mean `beta * previous + (1 - beta) * new`."""
    return jax.tree.map(lambda m, x: m + (1 - beta) * (x - m), previous, new)


def moving_average_of_squares(previous: Tree, beta: Any, new: Tree) -> Tree:
    """Return the exponential mean of the squares of `new`."""
    return jax.tree.map(lambda v, x: beta * v + (1 - beta) * x * x, previous, new)


def unzip(tree: Tree, like: Tree, count: int) -> tuple[Tree, ...]:
    """Return a tree of tuples, made by a map over `like`, as a tuple of trees."""
    treedef: Any = jax.tree.structure(like)
    rows = treedef.flatten_up_to(tree)
    return tuple(treedef.unflatten([row[i] for row in rows]) for i in range(count))


def norm(x: jax.Array) -> jax.Array:
    """Return the 2-norm of all elements, at least float32."""
    x = x.astype(state_dtype(x.dtype))
    return jnp.sqrt(jnp.sum(x * x))


def need_params(optimizer: str, params: Tree) -> Tree:
    """Return `params`.

    Raises:
      ValueError: there are none.
    """
    if params is None:
        raise ValueError(f"{optimizer} needs the parameters: call update(grads, state, params)")
    return params


def is_zero(number: Any) -> bool:
    """Return whether a setting is the constant 0, not data."""
    return isinstance(number, int | float) and number == 0


def ascent(maximize: bool) -> Parts:
    """Return what `maximize=True` does to gradients."""
    return [("ascent", optax.scale(-1.0))] if maximize else []


def chain_with_decay(scale: Parts, lr: Any, weight_decay: Any, *, decoupled: bool, maximize: bool = False) -> Parts:
    """Return the usual chain: coupled decay before `scale`, or decoupled decay behind it, and the learning rate."""
    decay = [] if is_zero(weight_decay) else [("add_decayed_weights", add_decayed_weights_by_rule(weight_decay))]
    rate = ("scale_by_learning_rate", scale_by_group_learning_rate(lr))
    return [*ascent(maximize), *scale, *decay, rate] if decoupled else [*ascent(maximize), *decay, *scale, rate]
