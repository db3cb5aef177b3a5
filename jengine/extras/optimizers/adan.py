"""Adan with the formulas of MMPretrain."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Decay, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer
from jengine.optim.transforms.groups import PerParameter, broadcast_to_params


@define_optimizer("lr", "betas", "eps", "weight_decay")
def ProximalAdan(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay, Decay] = (0.98, 0.92, 0.99),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    max_grad_norm: NonNegative = 0.0,
    no_prox: bool = False,
) -> Parts:
    """Build Adan, adaptive Nesterov momentum (Xie et al., arXiv:2208.06677), with proximal weight
    decay.

    Args:
      lr: learning rate.
      betas: decay rates for the averages of gradients, of gradient differences, and of squares.
      eps: added to the denominator.
      weight_decay: weight decay coefficient.
      max_grad_norm: maximum global gradient norm; 0 for no clipping. Groups that differ in more
        than lr and weight_decay are clipped separately.
      no_prox: decoupled weight decay, as in AdamW.
    """
    # The paper clips inside the optimizer; `clip_grad` of the wrapper comes before it and may be
    # set as well.
    clip = (
        [("clip_by_global_norm", optax.clip_by_global_norm(max_grad_norm))]
        if max_grad_norm > 0
        else []
    )
    proximal = (
        []
        if no_prox
        else [("divide_by_proximal_decay", divide_by_proximal_decay(lr, weight_decay))]
    )
    scale = [("scale_by_adan", scale_by_adan(*betas, eps))]
    return [*clip, *common.chain_with_decay(scale, lr, weight_decay, decoupled=True), *proximal]


class AdanState(NamedTuple):
    """Adan's state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Updates  # float32, like the parameters: mean gradients
    delta: Updates  # float32, like the parameters: mean gradient differences
    nu: Updates  # float32, like the parameters: mean squared look-ahead gradients
    previous_grads: Updates  # float32, like the parameters


def scale_by_adan(b1: Scalar, b2: Scalar, b3: Scalar, eps: Scalar) -> optax.GradientTransformation:
    """Rescale gradients by Adan.

    `optax.scale_by_adan` weights the difference of gradients by `1 - b2`, not by `b2`.
    """

    def init(params: Any) -> AdanState:
        return AdanState(common.zero_count(), *(common.zeros_like(params) for _ in range(4)))

    def update(
        grads: Updates, state: AdanState, params: Any | None = None
    ) -> tuple[Updates, AdanState]:
        count = state.count + 1
        # The first gradient has no predecessor: with the zeros of the state its difference would be
        # the gradient itself.
        change = jax.tree.map(
            lambda g, p: jnp.where(state.count == 0, 0, g - p), grads, state.previous_grads
        )
        mu = common.moving_average(state.mu, b1, grads)
        delta = common.moving_average(state.delta, b2, change)
        # The squares are of the look-ahead gradient, with the same weight as in the update.
        nu = common.moving_average_of_squares(
            state.nu, b3, jax.tree.map(lambda g, c: g + b2 * c, grads, change)
        )
        first, second, third = (common.bias_correction(b, count) for b in (b1, b2, b3))
        updates = jax.tree.map(
            lambda m, d, v: (m / first + b2 * d / second) / (jnp.sqrt(v / third) + eps),
            mu,
            delta,
            nu,
        )
        return updates, AdanState(count, mu, delta, nu, grads)

    return optax.GradientTransformation(init, update)


def divide_by_proximal_decay(
    learning_rate: PerParameter, weight_decay: PerParameter
) -> optax.GradientTransformation:
    """Divide updates by `1 + learning_rate * weight_decay`, which makes decoupled weight decay
    proximal.

    Both arguments are numbers, or trees of numbers like the parameters.
    """

    def update(updates: Updates, params: Any) -> Updates:
        rates = broadcast_to_params(learning_rate, updates)
        decays = broadcast_to_params(weight_decay, updates)
        return jax.tree.map(lambda u, lr, decay: u / (1 + lr * decay), updates, rates, decays)

    return optax.stateless(update)
