"""Accumulate gradients over several iterations, and average them over a mapped axis."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any

_MIN_WEIGHT = 1e-12  # weights sum to 0 only if no example counts, and then the gradients are 0 too


class AccumulateState(NamedTuple):
    """Hold the gradients of an unfinished window."""

    accumulated_grads: PyTree  # float32, like the parameters: their sum
    num_accumulated: jax.Array  # int32[], iterations in accumulated_grads, which is invalid at 0
    weight_sum: jax.Array  # float32[], sum of the weights in accumulated_grads
    inner_state: Any


def accumulate_gradients(
    inner: optax.GradientTransformation, every: int, axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Call `inner` with the mean gradient of `every` iterations; the other iterations only add their gradients.

    Unlike in `optax.MultiSteps`, `inner` does not run in the other iterations (`lax.cond`, or no code at all if
    `is_last` is a Python bool), gradients may have weights, and replicas exchange them once per window. It wraps
    `inner`, like `optax.apply_if_finite`, because a part of a chain cannot keep the parts after it from running.

    The update takes these extra arguments:
      is_last: whether this iteration ends the window; with a Python bool only that case is compiled. None: every
        `every`-th iteration ends it.
      weight: float32[], the weight of these gradients in the mean over the window and over replicas; for the mean loss
        of a batch of sentences, its number of words. None: all have the same weight.
      divisor: float32[], divides the sum; None for the number of iterations in the window. Unused with weights.

    Args:
      inner: the transformation of mean gradients.
      every: number of iterations in a window; 1 adds no state and returns the state of `inner`.
      axis_name: mapped axis (of `jax.pmap` or `jax.shard_map`) over which gradients are averaged.

    Returns:
      The transformation. Its updates are zeros in iterations that only accumulate.
    """
    inner = optax.with_extra_args_support(inner)

    def update_every_iteration(
        grads: PyTree, state: Any, params: PyTree = None, *, weight: Any = None, is_last: Any = None,
        divisor: Any = None, **extra: Any,
    ) -> tuple[PyTree, Any]:  # fmt: skip
        return _update_inner(inner, axis_name, _scale(grads, weight), state, params, weight, extra)

    if every == 1:
        return optax.GradientTransformationExtraArgs(inner.init, update_every_iteration)

    def init(params: PyTree) -> AccumulateState:
        return init_accumulation(params, inner.init(params))

    def update(
        grads: PyTree, state: AccumulateState, params: PyTree = None, *, weight: Any = None, is_last: Any = None,
        divisor: Any = None, **extra: Any,
    ) -> tuple[PyTree, AccumulateState]:  # fmt: skip
        total = _add(state, _scale(grads, weight))
        weight_sum = jnp.where(state.num_accumulated == 0, 0, state.weight_sum) + (1 if weight is None else weight)
        count = state.num_accumulated + 1

        def accumulate() -> tuple[PyTree, AccumulateState]:
            zeros = jax.tree.map(jnp.zeros_like, grads)
            return zeros, AccumulateState(total, count, weight_sum, state.inner_state)

        def finish() -> tuple[PyTree, AccumulateState]:
            mean_weight: jax.Array | None = weight_sum
            mean = total
            if weight is None:
                length = count if divisor is None else divisor
                mean, mean_weight = jax.tree.map(lambda g: g / jnp.asarray(length, g.dtype), total), None
            updates, inner_state = _update_inner(inner, axis_name, mean, state.inner_state, params, mean_weight, extra)
            # the next window starts with 0 iterations; keeping the sums avoids writing zeros
            return updates, AccumulateState(total, jnp.zeros_like(count), state.weight_sum, inner_state)

        if is_last is None:
            return jax.lax.cond(count >= every, finish, accumulate)
        return finish() if is_last else accumulate()

    return optax.GradientTransformationExtraArgs(init, update)


def init_accumulation(params: PyTree, inner_state: Any) -> AccumulateState:
    """Return the state of an empty window."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return AccumulateState(zeros, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), inner_state)


def sum_gradients(state: AccumulateState) -> PyTree:
    """Return the sum of the gradients accumulated so far."""
    return _add(state, jax.tree.map(jnp.zeros_like, state.accumulated_grads))


def _update_inner(
    inner: optax.GradientTransformationExtraArgs, axis_name: str | None, grads: PyTree, state: Any, params: PyTree,
    weight: jax.Array | None, extra: dict[str, Any],
) -> tuple[PyTree, Any]:  # fmt: skip
    """Call `inner` with the mean of `grads` over replicas; `weight` is a divisor not yet applied to them."""
    if axis_name is not None:
        grads, weight = jax.lax.pmean((grads, weight), axis_name)
    if weight is not None:
        divisor = jnp.maximum(weight, _MIN_WEIGHT)
        grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
    if "grad" in extra:
        extra = {**extra, "grad": grads}
    return inner.update(grads, state, params, **extra)


def _add(state: AccumulateState, grads: PyTree) -> PyTree:
    is_first = state.num_accumulated == 0
    return jax.tree.map(lambda a, g: jnp.where(is_first, 0, a) + g.astype(a.dtype), state.accumulated_grads, grads)


def _scale(grads: PyTree, weight: Any) -> PyTree:
    return grads if weight is None else jax.tree.map(lambda g: g * jnp.asarray(weight, g.dtype), grads)
