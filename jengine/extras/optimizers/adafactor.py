"""Adafactor with the formulas of torch.optim.Adafactor."""

from collections.abc import Sequence
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import NonNegative, Range
from jengine.extras.optimizers import trees
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer
from jengine.optim.transforms.groups import PerParameter, broadcast_to_params


@define_optimizer("lr", "beta2_decay", "d", "weight_decay", decay="decoupled", by_layer=True)
def TorchAdafactor(
    lr: NonNegative = 1e-2,
    beta2_decay: Annotated[float, Range(le=0)] = -0.8,
    eps: tuple[NonNegative | None, NonNegative] = (None, 1e-3),
    d: Annotated[float, Range(ge=1)] = 1.0,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
    stacked: Any = None,
) -> Parts:
    """Build Adafactor (Shazeer and Stern, arXiv:1804.04235), factored over the last two axes of
    each tensor, without those along which layers are stacked.

    Args:
      lr: maximum relative step size.
      beta2_decay: exponent of the step in the second moment's decay.
      eps: lower bounds for the second moment's square root (None: the float32 precision) and for
        the parameter scale; constants, which cannot be scheduled.
      d: maximum root mean square of an update.
      weight_decay: decoupled decay.
      maximize: maximize the loss.
    """
    eps1, eps2 = eps
    # PyTorch takes the epsilon of the parameter, but states and gradients are float32 here,
    # whatever the parameter is.
    eps1 = float(jnp.finfo(jnp.float32).eps) if eps1 is None else eps1
    return [
        ("scale_by_factored_rms", scale_by_factored_rms(beta2_decay, eps1, stacked)),
        ("clip_by_block_rms", clip_by_layer_rms(d, stacked)),
        ("scale_by_param_block_rms", scale_by_layer_rms(eps2, stacked)),
        # Last, as a factor: the rate that `chain_with_decay` multiplies with decays the weights
        # too, and that decay is not capped.
        ("cap_learning_rate", cap_learning_rate(lr)),
    ]


class FactoredRmsState(NamedTuple):
    """Factored second moments."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    # float32[..., n, 1], mean squares along the last axis; the whole second moment of a vector or
    # scalar
    rows: Updates
    # float32[..., 1, m], mean squares along the last but one; float32[] for a vector or scalar
    columns: Updates


def scale_by_factored_rms(
    beta2_decay: Scalar, eps: Scalar, stacked: Any = None
) -> optax.GradientTransformation:
    """Divide gradients by the root of a second moment that is factored over the last two axes of
    each tensor.

    `optax.scale_by_factored_rms` factors over the two largest axes, and only if both have at least
    128 elements.
    """

    def init(params: Any) -> FactoredRmsState:
        zeros = common.zeros_like(params)

        # Broadcastable against the gradient: the outer product below is then one elementwise
        # product, in stacked layers too.
        def leaf(z: jax.Array, axes: Sequence[int]) -> tuple[jax.Array, jax.Array]:
            if (pair := _last_axes(z, axes)) is None:
                return z, jnp.zeros((), z.dtype)
            row = jax.lax.slice_in_dim(z, 0, 1, axis=pair[1])
            return row, jax.lax.slice_in_dim(z, 0, 1, axis=pair[0])

        rows, columns = trees.map_unzipped(leaf, zeros, trees.broadcast_stacked(stacked, zeros))
        return FactoredRmsState(common.zero_count(), rows, columns)

    def update(
        grads: Updates, state: FactoredRmsState, params: Any | None = None
    ) -> tuple[Updates, FactoredRmsState]:
        count = state.count + 1

        def leaf(
            g: jax.Array, row: jax.Array, column: jax.Array, axes: Sequence[int]
        ) -> tuple[jax.Array, ...]:
            # At the first update the weight is 1, which replaces the zeros: no bias has to be
            # corrected.
            weight = count.astype(row.dtype) ** beta2_decay
            square = g * g
            if (pair := _last_axes(g, axes)) is not None:
                row = row + weight * (jnp.mean(square, pair[1], keepdims=True) - row)
                column = column + weight * (jnp.mean(square, pair[0], keepdims=True) - column)
                # The rank-1 estimate of Adafactor: row and column means over the overall mean,
                # which both contain.
                moment = row * column / jnp.maximum(jnp.mean(row, pair[0], keepdims=True), eps)
            else:
                row = row + weight * (square - row)
                moment = row
            # A lower bound instead of a sum, as in PyTorch: eps has no effect on moments that are
            # large enough.
            return g * jax.lax.rsqrt(jnp.maximum(moment, eps**2)), row, column

        updates, rows, columns = trees.map_unzipped(
            leaf, grads, state.rows, state.columns, trees.broadcast_stacked(stacked, grads)
        )
        return updates, FactoredRmsState(count, rows, columns)

    return optax.GradientTransformation(init, update)


def _last_axes(x: jax.Array, stacked: Sequence[int]) -> tuple[int, int] | None:
    """Return the last two axes of a layer; None for a vector or scalar."""
    axes = [axis for axis in range(x.ndim) if axis not in stacked]
    return (axes[-2], axes[-1]) if len(axes) > 1 else None


def clip_by_layer_rms(threshold: Scalar, stacked: Any = None) -> optax.GradientTransformation:
    """Limit the root mean square of each layer's update; optax limits that of tensors."""

    def update(updates: Updates, params: Any | None) -> Updates:
        def leaf(u: jax.Array, axes: Sequence[int]) -> jax.Array:
            mean = jnp.mean(jnp.square(u), **trees.layer_axes(u, axes))
            return u / jnp.maximum(1.0, jnp.sqrt(mean) / threshold)

        return jax.tree.map(leaf, updates, trees.broadcast_stacked(stacked, updates))

    return optax.stateless(update)


def scale_by_layer_rms(min_scale: Scalar, stacked: Any = None) -> optax.GradientTransformation:
    """Multiply updates by the root mean square of each layer's parameters, at least `min_scale`;
    `optax.scale_by_param_block_rms` takes that of tensors.
    """

    def update(updates: Updates, params: Any) -> Updates:
        def leaf(u: jax.Array, p: jax.Array, axes: Sequence[int]) -> jax.Array:
            mean = jnp.mean(jnp.square(p), **trees.layer_axes(p, axes))
            return u * jnp.maximum(jnp.sqrt(mean), min_scale)

        params = trees.require_params("TorchAdafactor", params)
        return jax.tree.map(leaf, updates, params, trees.broadcast_stacked(stacked, params))

    return optax.stateless(update)


class CapLearningRateState(NamedTuple):
    """State of `cap_learning_rate`."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done


def cap_learning_rate(learning_rate: PerParameter) -> optax.GradientTransformation:
    """Scale updates so that the learning rate, applied later in the chain, acts like at most `1
    / sqrt(count)`.
    """

    def update(
        updates: Updates, state: CapLearningRateState, params: Any | None = None
    ) -> tuple[Updates, CapLearningRateState]:
        count = state.count + 1

        def leaf(u: jax.Array, lr: Scalar) -> jax.Array:
            # The rate follows in the chain: this makes of it min(lr, 1 / sqrt(count)).
            return u * jnp.minimum(1, jax.lax.rsqrt(count.astype(u.dtype)) / lr)

        return jax.tree.map(
            leaf, updates, broadcast_to_params(learning_rate, updates)
        ), CapLearningRateState(count)

    return optax.GradientTransformation(
        lambda params: CapLearningRateState(common.zero_count()), update
    )
