"""Gradient accumulation over several iterations, and the mean over a mapped axis."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.typing import ArrayLike
from optax import OptState, Updates

_MIN_WEIGHT = 1e-12  # weights sum to 0 only if no example counts, and then the gradients are 0 too


class AccumulateState(NamedTuple):
    """Gradients of an unfinished window.

    Replicas have different sums: added up over the replicas, they are what one device would have.
    """

    accumulated_grads: Updates  # float32, like the parameters: the weighted sum
    num_accumulated: jax.Array  # int32[], iterations in accumulated_grads, which is invalid at 0
    # float32[] (float64[] for such gradients), sum of the weights; equal ones are 1 / replicas
    weight_sum: jax.Array
    inner_state: OptState


def accumulate_gradients(
    inner: optax.GradientTransformation, every: int, axis_name: str | None = None
) -> optax.GradientTransformationExtraArgs:
    """Call `inner` with the mean gradient of `every` iterations.

    The others add gradients and return zero updates.

    Unlike in `optax.MultiSteps`, `inner` runs only in the last iteration (`lax.cond`, or a Python
    bool `is_last`), gradients may have weights, and replicas exchange them once per window. It
    wraps `inner`, like `optax.apply_if_finite`, because a part of a chain cannot keep the parts
    after it from running.

    >>> tx = accumulate_gradients(optax.sgd(1.0), every=2)
    >>> state = tx.init(jnp.zeros(1))
    >>> for gradient in (1.0, 3.0):
    ...     updates, state = tx.update(jnp.array([gradient]), state)
    >>> updates.tolist()
    [-2.0]

    The update takes these extra arguments:

    * is_last: whether this iteration ends the window; with a Python bool only that case is
      compiled. None: every `every`-th iteration ends it.
    * weight: float32[], the weight of these gradients in the mean over the window and over
      replicas; for a mean loss over sentences, the number of words. None: all have the same weight.
    * is_added: True if an earlier call with `is_last=False` has added these gradients.

    Args:
      inner: transforms the mean gradients.
      every: iterations in a window; 1 adds no state and returns the inner state.
      axis_name: mapped axis (of `jax.pmap` or `jax.shard_map`) over which gradients are averaged.
    """
    inner = optax.with_extra_args_support(inner)
    if every == 1:
        return optax.GradientTransformationExtraArgs(
            inner.init, functools.partial(_update_at_once, inner, axis_name)
        )

    def init(params: Any) -> AccumulateState:
        return init_accumulation(params, inner.init(params))

    def update(
        grads: Updates,
        state: AccumulateState,
        params: Any | None = None,
        *,
        weight: ArrayLike | None = None,
        is_last: bool | None = None,
        is_added: bool = False,
        **extra: Any,
    ) -> tuple[Updates, AccumulateState]:
        total, count, weight_sum, _ = state
        if not is_added:
            total, count, weight_sum = _add_to_window(state, grads, _share(weight, axis_name))

        def accumulate() -> tuple[Updates, AccumulateState]:
            return jax.tree.map(jnp.zeros_like, grads), AccumulateState(
                total, count, weight_sum, state.inner_state
            )

        def accumulate_like_finish() -> tuple[Updates, AccumulateState]:
            # Not zeros like the gradients: under `shard_map` those vary over replicas, and updates
            # do not.
            return jax.tree.map(jnp.zeros_like, jax.eval_shape(finish)[0]), accumulate()[1]

        def finish() -> tuple[Updates, AccumulateState]:
            # Counted on the device: a window may be shorter, at the end of a run or because a hook
            # dropped iterations.
            divisor = count if weight is None else _sum_over_replicas(weight_sum, axis_name)
            summed = _sum_over_replicas(total, axis_name)
            updates, inner_state = _update_inner(
                inner, summed, divisor, state.inner_state, params, extra
            )
            # the next window starts with 0 iterations; keeping the sums avoids writing zeros
            return updates, AccumulateState(total, jnp.zeros_like(count), weight_sum, inner_state)

        if is_last is None:
            return jax.lax.cond(count >= every, finish, accumulate_like_finish)
        return finish() if is_last else accumulate()

    return optax.GradientTransformationExtraArgs(init, update)


def _update_at_once(
    inner: optax.GradientTransformationExtraArgs,
    axis_name: str | None,
    grads: Updates,
    state: OptState,
    params: Any | None = None,
    *,
    weight: ArrayLike | None = None,
    is_last: bool | None = None,
    is_added: bool = False,
    **extra: Any,
) -> tuple[Updates, OptState]:
    """Call `inner` with the mean over replicas.

    In a window of one iteration there is nothing to accumulate.
    """
    # Weighted before the sum: replicas may have different numbers of real examples, as in a padded
    # last batch.
    grads = _sum_over_replicas(_scale(grads, _share(weight, axis_name)), axis_name)
    divisor = None if weight is None else _sum_over_replicas(weight, axis_name)
    return _update_inner(inner, grads, divisor, state, params, extra)


def init_accumulation(params: Any, inner_state: OptState) -> AccumulateState:
    """Return the state of an empty window."""
    zeros = jax.tree.map(jnp.zeros_like, params)
    dtype = jnp.result_type(jnp.float32, *jax.tree.leaves(params))
    return AccumulateState(zeros, jnp.zeros((), jnp.int32), jnp.zeros((), dtype), inner_state)


def sum_gradients(state: AccumulateState, axis_name: str | None = None) -> Updates:
    """Return the sum of the gradients accumulated so far, on this replica."""
    total = _add(state, jax.tree.map(jnp.zeros_like, state.accumulated_grads))
    # Gradients were added with a share of 1 / replicas; here a replica's own sum is asked for.
    return total if axis_name is None else _scale(total, jax.lax.axis_size(axis_name))


def _update_inner(
    inner: optax.GradientTransformationExtraArgs,
    grads: Updates,
    divisor: ArrayLike | None,
    state: OptState,
    params: Any,
    extra: dict[str, Any],
) -> tuple[Updates, OptState]:
    """Call `inner` with the mean gradients: the sum `grads` divided by `divisor`, None for 1."""
    if divisor is not None:
        divisor = jnp.maximum(divisor, _MIN_WEIGHT)
        grads = jax.tree.map(lambda g: g / jnp.asarray(divisor, g.dtype), grads)
    if "grad" in extra:
        # A line search starts from the gradient of the whole window, not of the last iteration.
        extra = {**extra, "grad": grads}
    return inner.update(grads, state, params, **extra)


def _share(weight: ArrayLike | None, axis_name: str | None) -> ArrayLike | None:
    """Return the weight of a replica's gradients in a sum over replicas; None for 1."""
    # A sum over replicas, of shares that add up to 1, is their mean.
    return 1 / jax.lax.axis_size(axis_name) if weight is None and axis_name is not None else weight


def _sum_over_replicas(tree: Updates, axis_name: str | None) -> Updates:
    return tree if axis_name is None else jax.lax.psum(tree, axis_name)


def _add(state: AccumulateState, grads: Updates) -> Updates:
    # `where` and not a product with 0: the old sums may contain NaN from a skipped update.
    is_first = state.num_accumulated == 0
    return jax.tree.map(
        lambda a, g: jnp.where(is_first, 0, a) + g.astype(a.dtype), state.accumulated_grads, grads
    )


def _add_to_window(
    state: AccumulateState, grads: Updates, share: ArrayLike | None
) -> tuple[Updates, jax.Array, jax.Array]:
    """Return the weighted sum with these gradients, the number of iterations in it, and the sum
    of the weights.
    """
    total = _add(state, _scale(grads, share))
    added = jnp.asarray(1 if share is None else share, state.weight_sum.dtype)
    # As in `_add`, the first iteration of a window overwrites: nothing has to be reset at its end.
    weight_sum = jnp.where(state.num_accumulated == 0, 0, state.weight_sum) + added
    return total, state.num_accumulated + 1, weight_sum


def _scale(grads: Updates, weight: ArrayLike | None) -> Updates:
    return (
        grads if weight is None else jax.tree.map(lambda g: g * jnp.asarray(weight, g.dtype), grads)
    )
