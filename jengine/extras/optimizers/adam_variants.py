"""Adamax, NAdam and RAdam with the formulas of torch.optim."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Decay, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.adam import scale_by_moments
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer


@define_optimizer("lr", "betas", "eps", "weight_decay", decay="coupled")
def Adamax(
    lr: NonNegative = 2e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
) -> Parts:
    """Build Adamax, Adam with the infinity norm (Kingma and Ba, arXiv:1412.6980), with coupled
    weight decay.

    Args:
      lr: learning rate.
      betas: decay rates for the average gradient and the infinity norm.
      eps: added to the norm.
      weight_decay: weight decay coefficient.
      maximize: maximize the loss.
    """
    return [("scale_by_adamax", optax.scale_by_adamax(*betas, eps))]


@define_optimizer("lr", "betas", "eps", "weight_decay", "momentum_decay", decay="coupled")
def NAdam(
    lr: NonNegative = 2e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    momentum_decay: NonNegative = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Parts:
    """Build NAdam, Adam with Nesterov momentum (Dozat, ICLR workshop 2016).

    Args:
      lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: see `Adam`.
      momentum_decay: how fast the momentum increases from `betas[0] / 2` to `betas[0]`.
    """
    return [("scale_by_nadam", scale_by_nadam(*betas, eps, momentum_decay))]


@define_optimizer("lr", "betas", "eps", "weight_decay", decay="coupled")
def RAdam(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Parts:
    """Build RAdam, rectified Adam (Liu et al., arXiv:1908.03265).

    Args:
      lr, betas, eps, weight_decay, decoupled_weight_decay, maximize: see `Adam`.
    """
    return [("scale_by_radam", scale_by_radam(*betas, eps))]


class NadamState(NamedTuple):
    """NAdam's state: Adam's averages, and the momentum product."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Updates  # float32, like the parameters: mean gradients
    nu: Updates  # float32, like the parameters: mean squares
    momentum_product: jax.Array  # float32[], product of all momenta so far


def scale_by_nadam(
    b1: Scalar, b2: Scalar, eps: Scalar, momentum_decay: Scalar
) -> optax.GradientTransformation:
    """Rescale gradients by NAdam.

    `optax.scale_by_adam(nesterov=True)` lacks the momentum schedule.
    """

    def momentum(count: jax.Array) -> jax.Array:
        return b1 * (1 - 0.5 * 0.96 ** (count * momentum_decay))

    def rescale(
        count: jax.Array, grads: Updates, mu: Updates, nu: Updates, old_product: jax.Array
    ) -> tuple[Updates, jax.Array]:
        # Nesterov looks ahead: the average is weighted with the momentum of the next step, the
        # gradient with that of this one.
        current = momentum(count)
        following = momentum(count + 1)
        product = old_product * current
        grad_weight = (1 - current) / (1 - product)
        mean_weight = following / (1 - product * following)
        second = common.bias_correction(b2, count)
        updates = jax.tree.map(
            lambda g, m, v: (grad_weight * g + mean_weight * m) / (jnp.sqrt(v / second) + eps),
            grads,
            mu,
            nu,
        )
        # A float64 beta would promote the product, and a state that changes its dtype compiles the
        # step again.
        return updates, product.astype(old_product.dtype)

    return scale_by_moments(
        b1, b2, rescale, NadamState, lambda params: (jnp.ones((), jnp.float32),)
    )


def scale_by_radam(b1: Scalar, b2: Scalar, eps: Scalar) -> optax.GradientTransformation:
    """Rescale gradients by rectified Adam.

    `optax.scale_by_radam` adds eps after the bias correction.
    """

    def rescale(count: jax.Array, grads: Updates, mu: Updates, nu: Updates) -> tuple[Updates]:
        first = common.bias_correction(b1, count)
        is_rectified = _average_length(b2, count) > 5
        factor = _rectification(b2, count)

        def leaf(m: jax.Array, v: jax.Array) -> jax.Array:
            # Before the variance can be estimated the update is plain momentum. The correction of
            # the squares is in the factor, so that eps is added to the root alone.
            return m / first * jnp.where(is_rectified, factor / (jnp.sqrt(v) + eps), 1)

        return (jax.tree.map(leaf, mu, nu),)

    return scale_by_moments(b1, b2, rescale)


def _average_length(beta: Scalar, count: jax.Array) -> jax.Array:
    """Return the length of the approximated moving average, rho_t in the paper."""
    rate = -jnp.log(beta)
    t = count.astype(jnp.result_type(beta))
    x = t * rate
    plain = 2 / (1 - beta) - 1 - 2 * t / jnp.expm1(x)
    # In the first steps the plain formula is about 1999 - 1994, which cancels in float32: use its
    # series in x there.
    x2 = x * x
    series = t + rate / 6 - 2 * t * x * (1 / 12 - x2 * (1 / 720 - x2 * (1 / 30240 - x2 / 1209600)))
    return jnp.where(x < 1, series, plain)


def _rectification(beta: Scalar, count: jax.Array) -> jax.Array:
    """Return r_t in the paper times the root of the bias correction for the squares."""
    infinite = 2 / (1 - beta) - 1
    # for smaller lengths the result is not used
    length = jnp.maximum(_average_length(beta, count), 5)
    factor = (length - 4) * (length - 2) * infinite / ((infinite - 4) * (infinite - 2) * length)
    return jnp.sqrt(factor * common.bias_correction(beta, count))
