"""Dynamic loss scaling with the rule in PyTorch's GradScaler."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Updates

from jengine.config.annotations import Count, Positive, Range, check_values
from jengine.config.errors import config_path


class LossScaleState(NamedTuple):
    """The loss scale, and what it depends on."""

    loss_scale: jax.Array  # float32[], multiplies the loss
    growth_tracker: jax.Array  # int32[], finite updates since the scale last changed
    skipped_steps: jax.Array  # int32[], updates skipped so far
    is_finite: jax.Array  # bool[], whether the gradients of the last update were finite
    inner_state: OptState


class LossScale(NamedTuple):
    """Settings for `dynamic_loss_scale`."""

    init_scale: Positive = 65536.0
    growth_factor: Annotated[float, Range(ge=1)] = 2.0
    backoff_factor: Annotated[float, Range(gt=0, le=1)] = 0.5
    growth_interval: Count = 2000
    min_scale: Positive = 2.0**-126
    max_scale: Positive = 2.0**127

    def check(self) -> None:
        """Raise ValueError for a setting that is out of range, TypeError for one that is no
        number.
        """
        with config_path("loss_scale"):
            check_values("", LossScale, self._asdict())
        if self.min_scale > self.max_scale:
            raise ValueError(
                f"`loss_scale` must have min_scale <= max_scale, got {self.min_scale} and "
                f"{self.max_scale}"
            )


def dynamic_loss_scale(
    inner: optax.GradientTransformation,
    init_scale: float = 65536.0,
    growth_factor: float = 2.0,
    backoff_factor: float = 0.5,
    growth_interval: int = 2000,
    min_scale: float = 2.0**-126,
    max_scale: float = 2.0**127,
) -> optax.GradientTransformationExtraArgs:
    """Unscale the gradients of a scaled loss for `inner`.

    Skip non-finite updates, and adjust the scale.

    You should multiply the loss by `optax.tree.get(state, 'loss_scale')` before differentiating. A
    skipped update is zeros and does not change the inner state. `optax.apply_if_finite` does not
    adjust a scale and eventually applies a NaN; `flax.training.dynamic_scale` increases the scale
    one step later than PyTorch's scaler.

    >>> tx = dynamic_loss_scale(optax.sgd(0.5), init_scale=8.0)
    >>> updates, state = tx.update(jnp.array([8.0, jnp.inf]), tx.init(jnp.ones(2)))
    >>> updates.tolist(), state.loss_scale.item(), state.skipped_steps.item()
    ([0.0, 0.0], 4.0, 1)

    Args:
      inner: transforms the unscaled gradients.
      init_scale: the initial scale.
      growth_factor, growth_interval: after `growth_interval` consecutive finite updates the scale
        is multiplied by `growth_factor`; 1 for a constant scale.
      backoff_factor: multiplies the scale after a non-finite update.
      min_scale: the minimum scale; by default the smallest normal float32, below which CPUs flush
        to zero.
      max_scale: the maximum scale.
    """
    LossScale(
        init_scale, growth_factor, backoff_factor, growth_interval, min_scale, max_scale
    ).check()
    inner = optax.with_extra_args_support(inner)

    def init(params: Any) -> LossScaleState:
        return LossScaleState(  # each array occurs once, because states are donated
            loss_scale=jnp.asarray(init_scale, jnp.float32),
            growth_tracker=jnp.zeros((), jnp.int32),
            skipped_steps=jnp.zeros((), jnp.int32),
            is_finite=jnp.ones((), bool),
            inner_state=inner.init(params),
        )

    def update(
        grads: Updates, state: LossScaleState, params: Any | None = None, **extra: Any
    ) -> tuple[Updates, OptState]:
        finite = all_finite(grads)

        # unscaling inside the branch can be fused with the update; operands of a branch are written
        # to memory
        def apply() -> tuple[Updates, OptState]:
            unscaled = jax.tree.map(lambda g: g * (1 / state.loss_scale.astype(g.dtype)), grads)
            inner_extra = {**extra, "grad": unscaled} if "grad" in extra else extra
            return inner.update(unscaled, state.inner_state, params, **inner_extra)

        def skip() -> tuple[Updates, OptState]:
            updates, _ = jax.eval_shape(apply)
            return jax.tree.map(lambda u: jnp.zeros(u.shape, u.dtype), updates), state.inner_state

        # `lax.cond` rather than `jnp.where` on every leaf, which costs four times as much as the
        # update
        updates, inner_state = jax.lax.cond(finite, apply, skip)
        tracker = jnp.where(finite, state.growth_tracker + 1, 0)
        # after the count of this update, as PyTorch's scaler does
        is_growing = tracker == growth_interval
        larger = state.loss_scale * growth_factor
        scale = jnp.where(
            finite,
            # never infinite
            jnp.where(is_growing & (larger <= max_scale), larger, state.loss_scale),
            jnp.maximum(state.loss_scale * backoff_factor, min(min_scale, init_scale)),
        )
        skipped = state.skipped_steps + (~finite).astype(jnp.int32)
        return updates, LossScaleState(
            scale, jnp.where(is_growing, 0, tracker), skipped, finite, inner_state
        )

    return optax.GradientTransformationExtraArgs(init, update)


def all_finite(tree: Updates) -> jax.Array:
    """Return whether all elements in all leaves are finite, bool[]."""
    # zero times an infinity or a NaN is NaN, and a sum of floats is twice as fast as a logical and
    # of booleans
    return jnp.isfinite(
        sum((jnp.sum(leaf * 0) for leaf in jax.tree.leaves(tree)), start=jnp.zeros((), jnp.float32))
    )
