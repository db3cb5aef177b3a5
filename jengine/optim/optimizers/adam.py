"""Adam and AdamW as torch.optim defines them."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def Adam(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> Optimizer:
    """Build Adam (Kingma and Ba, arXiv:1412.6980), with AMSGrad (Reddi et al., arXiv:1904.09237).

    Raises:
      ValueError: a setting outside its range.
    """
    return _adam("Adam", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay)


@OPTIMIZERS.register_module()
def AdamW(
    lr: float = 1e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    Raises:
      ValueError: a setting outside its range.
    """
    return _adam("AdamW", lr, betas, eps, weight_decay, amsgrad, maximize, True)


def _adam(
    name: str, lr: float, betas: Sequence[float], eps: float, weight_decay: float, amsgrad: bool, maximize: bool,
    decoupled: bool,
) -> Optimizer:  # fmt: skip
    core.in_range(name, lr=lr, eps=eps, weight_decay=weight_decay)
    settings = {
        "lr": lr, "betas": core.betas_in_range(name, betas), "eps": eps, "weight_decay": weight_decay,
        "amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled,
    }  # fmt: skip
    return Optimizer(name, settings, _parts, ("lr", "betas", "eps", "weight_decay"))


def _parts(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, amsgrad: bool, maximize: bool, decoupled_weight_decay: bool
) -> Parts:
    b1, b2 = betas
    if amsgrad:
        scale: Parts = [("scale_by_amsgrad", scale_by_amsgrad(b1, b2, eps))]
    else:
        scale = [("scale_by_adam", scale_by_adam(b1, b2, eps))]
    return core.chain_with_decay(scale, lr, weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def scale_by_adam(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """Rescale gradients by Adam, with the state of `optax.scale_by_adam`.

    `optax.scale_by_adam` computes `1 - b2**count` in float32 without `expm1`: with its constants an update is off by up
    to 4e-5 (2e-6 here), with a traced b2 by 6e-6. And compilers may round its mean of squares otherwise within a
    `lax.scan`, so that steps in chunks would differ from single ones in the last bit.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
    """

    def update(grads: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count = state.count + 1
        mu = core.moving_average(state.mu, b1, grads)
        nu = core.moving_average_of_squares(state.nu, b2, grads)
        first, second = core.bias_correction(b1, count), jnp.sqrt(core.bias_correction(b2, count))
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v) / second + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_moments, update)


def init_moments(params: Tree) -> optax.ScaleByAdamState:
    """Return the state of Adam before the first update."""
    return optax.ScaleByAdamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params))


class AmsgradState(NamedTuple):
    """Hold the state of AMSGrad."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares
    nu_max: Tree  # float32, like the parameters: largest nu so far


def scale_by_amsgrad(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """Rescale gradients by AMSGrad; the maximum is taken before the bias correction, by optax after it.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
    """

    def init(params: Tree) -> AmsgradState:
        return AmsgradState(core.step_zero(), *(core.zeros_like(params) for _ in range(3)))

    def update(grads: Tree, state: AmsgradState, params: Tree = None) -> tuple[Tree, AmsgradState]:
        count = state.count + 1
        mu = core.moving_average(state.mu, b1, grads)
        nu = core.moving_average_of_squares(state.nu, b2, grads)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu)
        first, second = core.bias_correction(b1, count), jnp.sqrt(core.bias_correction(b2, count))
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v) / second + eps), mu, nu_max)
        return updates, AmsgradState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)
