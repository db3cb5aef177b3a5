"""RAdam as torch.optim.RAdam defines it."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.optim.optimizers.adam import init_moments
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def RAdam(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build rectified Adam (Liu et al., arXiv:1908.03265).

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("RAdam", lr=lr, eps=eps, weight_decay=weight_decay)
    settings = {
        "lr": lr,
        "betas": core.betas_in_range("RAdam", betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "maximize": maximize,
    }
    return Optimizer("RAdam", settings, _parts, ("lr", "betas", "eps", "weight_decay"))


def _parts(lr: Any, betas: Any, eps: Any, weight_decay: Any, decoupled_weight_decay: bool, maximize: bool) -> Parts:
    b1, b2 = betas
    scale = [("scale_by_radam", scale_by_radam(b1, b2, eps))]
    return core.chain_with_decay(scale, lr, weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def scale_by_radam(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """Rescale gradients by rectified Adam; `optax.scale_by_radam` adds eps after the bias correction.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
    """

    def update(grads: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count = state.count + 1
        mu = core.moving_average(state.mu, b1, grads)
        nu = core.moving_average_of_squares(state.nu, b2, grads)
        first = core.bias_correction(b1, count)
        is_rectified, factor = _average_length(b2, count) > 5, _rectification(b2, count)

        def leaf(m: Any, v: Any) -> jax.Array:
            return m / first * jnp.where(is_rectified, factor / (jnp.sqrt(v) + eps), 1)

        return jax.tree.map(leaf, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_moments, update)


def _average_length(beta: jax.Array, count: jax.Array) -> jax.Array:
    """Return the length of the approximated moving average, rho_t of the paper.

    `rho_inf - 2 t beta**t / (1 - beta**t)` is 1999 minus 1994 in the first steps: in float32 nothing is left of the
    difference. There its series in `x = -t log(beta)` serves.
    """
    rate = -jnp.log(beta)
    t = count.astype(jnp.result_type(beta))
    x = t * rate
    plain = 2 / (1 - beta) - 1 - 2 * t / jnp.expm1(x)
    x2 = x * x
    series = t + rate / 6 - 2 * t * x * (1 / 12 - x2 * (1 / 720 - x2 * (1 / 30240 - x2 / 1209600)))
    return jnp.where(x < 1, series, plain)


def _rectification(beta: jax.Array, count: jax.Array) -> jax.Array:
    """Return r_t of the paper times the root of the bias correction of the squares."""
    infinite = 2 / (1 - beta) - 1
    length = jnp.maximum(_average_length(beta, count), 5)  # below it the value is not used
    factor = (length - 4) * (length - 2) * infinite / ((infinite - 4) * (infinite - 2) * length)
    return jnp.sqrt(factor * core.bias_correction(beta, count))
