"""Scale the loss dynamically, by the rule of PyTorch's GradScaler."""

import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

PyTree = Any


class LossScaleState(NamedTuple):
    """Hold the loss scale."""

    loss_scale: jax.Array  # float32[], multiplies the loss
    growth_tracker: jax.Array  # int32[], finite updates since the scale last changed
    skipped_steps: jax.Array  # int32[], updates skipped so far
    is_finite: jax.Array  # bool[], whether the gradients of the last update were finite
    inner_state: Any


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-126,
    max_scale: float = 2.0**127,
) -> optax.GradientTransformationExtraArgs:
    """Unscale gradients of a scaled loss for `inner`; skip updates with an infinity or a NaN, and move the scale.

    Multiply the loss by `optax.tree.get(state, 'loss_scale')` before differentiating. A skipped update is zeros and
    leaves the state of `inner` as it is. `optax.apply_if_finite` does not move a scale and applies a NaN in the end;
    `flax.training.dynamic_scale` grows one step later than PyTorch's scaler.

    Args:
      inner: the transformation of unscaled gradients.
      init_scale: the first scale.
      growth_factor: multiplies the scale after `growth_interval` finite updates in a row; 1 for a constant scale.
      backoff_factor: multiplies it after an update that is not finite.
      growth_interval: see growth_factor.
      min_scale: the smallest scale; by default the smallest normal float32, below which CPUs flush to zero.
      max_scale: the largest scale.

    Raises:
      ValueError: a setting outside its range.
    """
    if not 0 < init_scale < math.inf:
        raise ValueError(f"loss_scale.init_scale must be above 0 and finite, got {init_scale}")
    if growth_factor < 1:
        raise ValueError(f"loss_scale.growth_factor must be at least 1, got {growth_factor}")
    if not 0 < backoff_factor <= 1:
        raise ValueError(f"loss_scale.backoff_factor must be in (0, 1], got {backoff_factor}")
    if growth_interval < 1:
        raise ValueError(f"loss_scale.growth_interval must be at least 1, got {growth_interval}")
    if not 0 < min_scale <= max_scale < math.inf:
        raise ValueError(f"loss_scale must have 0 < min_scale <= max_scale, got {min_scale} and {max_scale}")
    inner = optax.with_extra_args_support(inner)

    def init(params: PyTree) -> LossScaleState:
        return LossScaleState(  # with no array twice, because states are donated
            loss_scale=jnp.asarray(init_scale, jnp.float32),
            growth_tracker=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            is_finite=jnp.ones((), bool),
            inner_state=inner.init(params),
        )

    def update(grads: PyTree, state: LossScaleState, params: PyTree = None, **extra: Any) -> tuple[PyTree, Any]:
        finite = all_finite(grads)
        inverse = 1 / state.loss_scale

        # the branch unscales by itself: what it is handed would have to be written out for it
        def apply() -> tuple[PyTree, Any]:
            unscaled = jax.tree.map(lambda g: g * inverse.astype(g.dtype), grads)
            given = {**extra, "grad": unscaled} if "grad" in extra else extra
            return inner.update(unscaled, state.inner_state, params, **given)

        def skip() -> tuple[PyTree, Any]:
            updates, _ = jax.eval_shape(apply)
            return jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), updates), state.inner_state

        # a branch, not a selection on every leaf: that costs four times the update
        updates, inner_state = jax.lax.cond(finite, apply, skip)
        tracker = jnp.where(finite, state.growth_tracker + 1, 0)
        grows = tracker == growth_interval
        grown = state.loss_scale * growth_factor
        scale = jnp.where(
            finite,
            jnp.where(grows & (grown <= max_scale), grown, state.loss_scale),
            jnp.maximum(state.loss_scale * backoff_factor, min(min_scale, init_scale)),
        )
        skipped = state.skipped_steps + (~finite).astype(jnp.int32)
        return updates, LossScaleState(scale, jnp.where(grows, 0, tracker), skipped, finite, inner_state)

    return optax.GradientTransformationExtraArgs(init, update)


def all_finite(tree: PyTree) -> jax.Array:
    """Return whether all elements of all leaves are finite, bool[]."""
    # zero times an infinity or a NaN is NaN, and a sum of floats is twice as fast as a conjunction of booleans
    return jnp.isfinite(sum((jnp.sum(leaf * 0) for leaf in jax.tree.leaves(tree)), start=jnp.zeros((), jnp.float32)))
