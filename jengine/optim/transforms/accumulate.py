"""Accumulate gradients over several iterations, and average them over a mapped axis."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any

_LEAST = 1e-12  # weights add up to 0 only where nothing counts, and then the gradients are 0 too


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

    Other than in `optax.MultiSteps`, `inner` does not run in the iterations between (a branch, or nothing at all where
    `is_last` is a Python bool), gradients may have weights, and replicas exchange them once a window. It takes `inner`,
    like `optax.apply_if_finite`, because a part that stands before others in a chain cannot keep them from running.

    The update takes these extra arguments:
      is_last: whether this iteration ends the window; a Python bool leaves the other case out of the program. None:
        the `every`-th ends it.
      weight: float32[], the weight of these gradients in the mean over the window and over replicas; for the mean loss
        of a batch of sentences, its number of words. None: all weigh the same.
      divisor: float32[], divides the sum; None for the number of iterations in the window. Unused with weights.

    Args:
      inner: the transformation of mean gradients.
      every: number of iterations in a window; 1 adds no state and passes on `inner`'s own.
      axis_name: mapped axis (of `jax.pmap` or `jax.shard_map`) over which gradients are averaged.

    Returns:
      The transformation. Its updates are zeros in the iterations between.
    """
    inner = optax.with_extra_args_support(inner)

    def apply(
        grads: PyTree, state: Any, params: PyTree, weight: jax.Array | None, extra: dict[str, Any]
    ) -> tuple[PyTree, Any]:
        """Call `inner` with gradients; `weight` is what they have still to be divided by."""
        if axis_name is not None:
            grads, weight = jax.lax.pmean((grads, weight), axis_name)
        if weight is not None:
            divisor = jnp.maximum(weight, _LEAST)
            grads = jax.tree.map(lambda g: g / divisor.astype(g.dtype), grads)
        if "grad" in extra:
            extra = {**extra, "grad": grads}
        return inner.update(grads, state, params, **extra)

    def update_at_once(
        grads: PyTree, state: Any, params: PyTree = None, *, weight: Any = None, is_last: Any = None,
        divisor: Any = None, **extra: Any,
    ) -> tuple[PyTree, Any]:  # fmt: skip
        return apply(_times(grads, weight), state, params, weight, extra)

    if every == 1:
        return optax.GradientTransformationExtraArgs(inner.init, update_at_once)

    def init(params: PyTree) -> AccumulateState:
        return init_accumulation(params, inner.init(params))

    def update(
        grads: PyTree, state: AccumulateState, params: PyTree = None, *, weight: Any = None, is_last: Any = None,
        divisor: Any = None, **extra: Any,
    ) -> tuple[PyTree, AccumulateState]:  # fmt: skip
        summed = _add(state, _times(grads, weight))
        weight_sum = jnp.where(state.num_accumulated == 0, 0, state.weight_sum) + (1 if weight is None else weight)
        count = state.num_accumulated + 1

        def accumulate() -> tuple[PyTree, AccumulateState]:
            zeros = jax.tree.map(jnp.zeros_like, grads)
            return zeros, AccumulateState(summed, count, weight_sum, state.inner_state)

        def finish() -> tuple[PyTree, AccumulateState]:
            if weight is None:
                by = count if divisor is None else divisor
                mean = jax.tree.map(lambda g: g / jnp.asarray(by, g.dtype), summed)
                updates, inner_state = apply(mean, state.inner_state, params, None, extra)
            else:
                updates, inner_state = apply(summed, state.inner_state, params, weight_sum, extra)
            # the next window starts with 0 iterations; the sums stay, because zeros would have to be written
            return updates, AccumulateState(summed, jnp.zeros_like(count), state.weight_sum, inner_state)

        if is_last is None:
            return jax.lax.cond(count >= every, finish, accumulate)
        return finish() if is_last else accumulate()

    return optax.GradientTransformationExtraArgs(init, update)


def init_accumulation(params: PyTree, inner_state: Any) -> AccumulateState:
    """Return the state of an empty window."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    return AccumulateState(zeros, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.float32), inner_state)


def sum_of_window(state: AccumulateState) -> PyTree:
    """Return the sum of the gradients of the window so far."""
    return _add(state, jax.tree.map(jnp.zeros_like, state.accumulated_grads))


def _add(state: AccumulateState, grads: PyTree) -> PyTree:
    is_first = state.num_accumulated == 0
    return jax.tree.map(lambda a, g: jnp.where(is_first, 0, a) + g.astype(a.dtype), state.accumulated_grads, grads)


def _times(grads: PyTree, weight: Any) -> PyTree:
    return grads if weight is None else jax.tree.map(lambda g: g * jnp.asarray(weight, g.dtype), grads)
