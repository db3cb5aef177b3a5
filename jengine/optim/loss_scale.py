"""Loss scaling by the rule of torch.cuda.amp.GradScaler, as pure functions on a small state.

`flax.training.dynamic_scale.DynamicScale` grows one step later; `optax.apply_if_finite` applies the infinity at last.
"""

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.errors import closest


class LossScaleState(NamedTuple):
    """State of a loss scale."""

    scale: jax.Array  # float32[], what the loss is multiplied by
    growth_tracker: jax.Array  # int32[], finite updates since the scale last changed
    skipped: jax.Array  # int32[], updates skipped so far
    finite: jax.Array  # bool[], whether the last update went through


class LossScale(NamedTuple):
    """How a loss scale moves.

    Args:
      init_scale: the first scale.
      growth_factor: what the scale is multiplied by after `growth_interval` finite updates in a row; 1 for never.
      backoff_factor: what it is multiplied by after an update with an infinity or a NaN.
      growth_interval: see growth_factor.
      min_scale: the floor; the smallest normal float32, below which CPUs flush to zero.
      max_scale: the ceiling.
    """

    init_scale: float = 65536.0
    growth_factor: float = 2.0
    backoff_factor: float = 0.5
    growth_interval: int = 2000
    min_scale: float = 2.0**-126
    max_scale: float = 2.0**127

    def init(self) -> LossScaleState:
        """The state before the first update."""
        scale = jnp.asarray(self.init_scale, jnp.float32)
        return LossScaleState(scale, jnp.zeros((), jnp.int32), jnp.zeros((), jnp.int32), jnp.ones((), bool))

    def update(self, state: LossScaleState, finite: jax.Array) -> LossScaleState:
        """Moves the scale after an update.

        Args:
          state: the state that the gradients were scaled with.
          finite: whether all gradients were finite, bool[].
        """
        tracker = jnp.where(finite, state.growth_tracker + 1, 0)
        grows = tracker == self.growth_interval
        grown = state.scale * self.growth_factor
        scale = jnp.where(
            finite,
            jnp.where(grows & (grown <= self.max_scale), grown, state.scale),
            jnp.maximum(state.scale * self.backoff_factor, min(self.min_scale, self.init_scale)),
        )
        skipped = state.skipped + (~finite).astype(jnp.int32)
        return LossScaleState(scale, jnp.where(grows, 0, tracker), skipped, finite)


def parse_loss_scale(loss_scale: str | float | Mapping[str, Any]) -> LossScale:
    """Reads the `loss_scale` of an AmpOptimWrapper.

    Args:
      loss_scale: 'dynamic'; a float, which never moves; or a dict of LossScale arguments.

    Raises:
      TypeError: anything else, or an unknown argument. ValueError: an argument outside its range.
    """
    if isinstance(loss_scale, str) and loss_scale == "dynamic":
        return LossScale()
    if isinstance(loss_scale, float):
        return _checked(LossScale(init_scale=loss_scale, growth_factor=1.0, backoff_factor=1.0))
    if isinstance(loss_scale, Mapping) or hasattr(loss_scale, "items"):
        arguments = dict(loss_scale.items())
        for key in arguments:
            if key not in LossScale._fields:
                raise TypeError(f"loss_scale has no {key!r}{closest(str(key), LossScale._fields)}")
        return _checked(LossScale(**arguments))
    raise TypeError(f"loss_scale must be 'dynamic', a float or a dict, found {loss_scale!r}")


def _checked(rule: LossScale) -> LossScale:
    if not (0 < rule.init_scale < math.inf):
        raise ValueError(f"loss_scale: init_scale must be above 0 and finite, found {rule.init_scale}")
    if rule.growth_factor < 1 or not 0 < rule.backoff_factor <= 1 or rule.growth_interval < 1:
        raise ValueError(
            "loss_scale: growth_factor must be at least 1, backoff_factor in (0, 1], growth_interval at least 1, found "
            f"{rule.growth_factor}, {rule.backoff_factor}, {rule.growth_interval}"
        )
    if not 0 < rule.min_scale <= rule.max_scale < math.inf:
        raise ValueError(f"loss_scale: 0 < min_scale <= max_scale needed, found {rule.min_scale}, {rule.max_scale}")
    return rule


def all_finite(tree: Any) -> jax.Array:
    """Whether every element of every leaf is finite, bool[]."""
    # zero times an infinity or a NaN is NaN, and a sum of floats is twice as fast as a conjunction of booleans
    return jnp.isfinite(sum((jnp.sum(leaf * 0) for leaf in jax.tree.leaves(tree)), start=jnp.zeros((), jnp.float32)))
