"""Define Adam, AdamW, Adamax, NAdam and RAdam with the formulas of torch.optim."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.annotations import Decay, NonNegative
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Tree
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def Adam(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> Optimizer:
    """Build Adam (Kingma and Ba, arXiv:1412.6980), with AMSGrad (Reddi et al., arXiv:1904.09237).

    Args:
      lr: learning rate.
      betas: decay rates of the averages of the gradient and of its square.
      eps: added to the denominator.
      weight_decay: coefficient of the weight decay.
      amsgrad: divide by the largest average of squares so far.
      maximize: maximize the loss.
      decoupled_weight_decay: decay the parameters directly, as AdamW does, instead of through the gradient.

    Raises:
      ValueError: a setting outside its range.
    """
    return _build_adam("Adam", lr, betas, eps, weight_decay, amsgrad, maximize, decoupled_weight_decay)


@OPTIMIZERS.register_module()
def AdamW(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 1e-2,
    amsgrad: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    Args:
      lr: learning rate.
      betas: decay rates of the averages of the gradient and of its square.
      eps: added to the denominator.
      weight_decay: coefficient of the weight decay.
      amsgrad: divide by the largest average of squares so far.
      maximize: maximize the loss.

    Raises:
      ValueError: a setting outside its range.
    """
    return _build_adam("AdamW", lr, betas, eps, weight_decay, amsgrad, maximize, True)


@OPTIMIZERS.register_module()
def Adamax(
    lr: NonNegative = 2e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Build Adamax, Adam with the infinity norm (Kingma and Ba, arXiv:1412.6980), with coupled weight decay.

    Args:
      lr: learning rate.
      betas: decay rates of the average of the gradient and of its infinity norm.
      eps: added to the norm.
      weight_decay: coefficient of the weight decay.
      maximize: maximize the loss.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = {
        "lr": lr,
        "betas": tuple(map(float, betas)),
        "eps": eps,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    return Optimizer("Adamax", settings, _adamax_parts, ("lr", "betas", "eps", "weight_decay"))


@OPTIMIZERS.register_module()
def NAdam(
    lr: NonNegative = 2e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    momentum_decay: NonNegative = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build NAdam, Adam with Nesterov momentum (Dozat, ICLR workshop 2016).

    Args:
      lr: learning rate.
      betas: decay of the means of gradients and of their squares.
      eps: added to the root of the squares.
      weight_decay: weight decay.
      momentum_decay: how fast the momentum increases from half of `betas[0]` to `betas[0]`.
      decoupled_weight_decay: decoupled weight decay, as in AdamW.
      maximize: maximize the objective.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = {
        "lr": lr,
        "betas": tuple(map(float, betas)),
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum_decay": momentum_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "maximize": maximize,
    }
    hyperparams = ("lr", "betas", "eps", "weight_decay", "momentum_decay")
    return Optimizer("NAdam", settings, _nadam_parts, hyperparams)


@OPTIMIZERS.register_module()
def RAdam(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build RAdam, rectified Adam (Liu et al., arXiv:1908.03265).

    Args:
      lr: learning rate.
      betas: decay rates of the averages of the gradient and of its square.
      eps: added to the denominator.
      weight_decay: coefficient of the weight decay.
      decoupled_weight_decay: decay the parameters directly, as AdamW does, instead of through the gradient.
      maximize: maximize the loss.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = {
        "lr": lr,
        "betas": tuple(map(float, betas)),
        "eps": eps,
        "weight_decay": weight_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "maximize": maximize,
    }
    return Optimizer("RAdam", settings, _radam_parts, ("lr", "betas", "eps", "weight_decay"))


def scale_by_adam(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """Rescale gradients by Adam, with the state of `optax.scale_by_adam`.

    `optax.scale_by_adam` computes `1 - b2**count` in float32 without `expm1`, with a relative error of the update of up
    to 4e-5 (here 2e-6), or 6e-6 for a traced b2. Also, compilers may round its mean of squares differently inside a
    `lax.scan`, so that steps in chunks would differ from single steps in the last bit.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
    """

    def update(grads: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count = state.count + 1
        mu = common.moving_average(state.mu, b1, grads)
        nu = common.moving_average_of_squares(state.nu, b2, grads)
        first, second = common.bias_correction(b1, count), jnp.sqrt(common.bias_correction(b2, count))
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v) / second + eps), mu, nu)
        return updates, optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_moments, update)


def init_moments(params: Tree) -> optax.ScaleByAdamState:
    """Return the initial state of Adam."""
    return optax.ScaleByAdamState(common.zero_count(), common.zeros_like(params), common.zeros_like(params))


class AmsgradState(NamedTuple):
    """Hold the state of AMSGrad."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares
    nu_max: Tree  # float32, like the parameters: largest nu so far


def scale_by_amsgrad(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """Rescale gradients by AMSGrad, with the maximum taken before the bias correction; optax takes it after.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
    """

    def init(params: Tree) -> AmsgradState:
        return AmsgradState(common.zero_count(), *(common.zeros_like(params) for _ in range(3)))

    def update(grads: Tree, state: AmsgradState, params: Tree = None) -> tuple[Tree, AmsgradState]:
        count = state.count + 1
        mu = common.moving_average(state.mu, b1, grads)
        nu = common.moving_average_of_squares(state.nu, b2, grads)
        nu_max = jax.tree.map(jnp.maximum, state.nu_max, nu)
        first, second = common.bias_correction(b1, count), jnp.sqrt(common.bias_correction(b2, count))
        updates = jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v) / second + eps), mu, nu_max)
        return updates, AmsgradState(count, mu, nu, nu_max)

    return optax.GradientTransformation(init, update)


class NadamState(NamedTuple):
    """Hold the state of NAdam."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares
    momentum_product: jax.Array  # float32[], product of all momenta so far


def scale_by_nadam(b1: Any, b2: Any, eps: Any, momentum_decay: Any) -> optax.GradientTransformation:
    """Rescale gradients by NAdam with its momentum schedule, which `optax.scale_by_adam(nesterov=True)` lacks.

    Args:
      b1: the final momentum, and the decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
      momentum_decay: how fast the momentum increases from half of b1 to b1.
    """

    def momentum(count: jax.Array) -> jax.Array:
        return b1 * (1 - 0.5 * 0.96 ** (count * momentum_decay))

    def init(params: Tree) -> NadamState:
        product = jnp.ones((), jnp.float32)
        return NadamState(common.zero_count(), common.zeros_like(params), common.zeros_like(params), product)

    def update(grads: Tree, state: NadamState, params: Tree = None) -> tuple[Tree, NadamState]:
        count = state.count + 1
        mu = common.moving_average(state.mu, b1, grads)
        nu = common.moving_average_of_squares(state.nu, b2, grads)
        current, following = momentum(count), momentum(count + 1)
        product = state.momentum_product * current
        grad_weight, mean_weight = (1 - current) / (1 - product), following / (1 - product * following)
        second = common.bias_correction(b2, count)
        updates = jax.tree.map(
            lambda g, m, v: (grad_weight * g + mean_weight * m) / (jnp.sqrt(v / second) + eps), grads, mu, nu
        )
        return updates, NadamState(count, mu, nu, product.astype(state.momentum_product.dtype))

    return optax.GradientTransformation(init, update)


def scale_by_radam(b1: Any, b2: Any, eps: Any) -> optax.GradientTransformation:
    """Rescale gradients by rectified Adam; `optax.scale_by_radam` adds eps after the bias correction.

    Args:
      b1: decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
    """

    def update(grads: Tree, state: optax.ScaleByAdamState, params: Tree = None) -> tuple[Tree, optax.ScaleByAdamState]:
        count = state.count + 1
        mu = common.moving_average(state.mu, b1, grads)
        nu = common.moving_average_of_squares(state.nu, b2, grads)
        first = common.bias_correction(b1, count)
        is_rectified, factor = _average_length(b2, count) > 5, _rectification(b2, count)

        def leaf(m: Any, v: Any) -> jax.Array:
            return m / first * jnp.where(is_rectified, factor / (jnp.sqrt(v) + eps), 1)

        return jax.tree.map(leaf, mu, nu), optax.ScaleByAdamState(count, mu, nu)

    return optax.GradientTransformation(init_moments, update)


def _build_adam(
    name: str, lr: float, betas: Sequence[float], eps: float, weight_decay: float, amsgrad: bool, maximize: bool,
    decoupled: bool,
) -> Optimizer:  # fmt: skip
    settings = {
        "lr": lr, "betas": tuple(map(float, betas)), "eps": eps, "weight_decay": weight_decay,
        "amsgrad": amsgrad, "maximize": maximize, "decoupled_weight_decay": decoupled,
    }  # fmt: skip
    return Optimizer(name, settings, _adam_parts, ("lr", "betas", "eps", "weight_decay"))


def _adam_parts(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, amsgrad: bool, maximize: bool, decoupled_weight_decay: bool
) -> Parts:
    b1, b2 = betas
    if amsgrad:
        scale: Parts = [("scale_by_amsgrad", scale_by_amsgrad(b1, b2, eps))]
    else:
        scale = [("scale_by_adam", scale_by_adam(b1, b2, eps))]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def _adamax_parts(lr: Any, betas: Any, eps: Any, weight_decay: Any, maximize: bool) -> Parts:
    scale = [("scale_by_adamax", optax.scale_by_adamax(*betas, eps))]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)


def _nadam_parts(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, momentum_decay: Any, decoupled_weight_decay: bool, maximize: bool
) -> Parts:
    b1, b2 = betas
    scale = [("scale_by_nadam", scale_by_nadam(b1, b2, eps, momentum_decay))]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def _radam_parts(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, decoupled_weight_decay: bool, maximize: bool
) -> Parts:
    b1, b2 = betas
    scale = [("scale_by_radam", scale_by_radam(b1, b2, eps))]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


def _average_length(beta: jax.Array, count: jax.Array) -> jax.Array:
    """Return the length of the approximated moving average, rho_t of the paper.

    In the first steps `rho_inf - 2 t beta**t / (1 - beta**t)` is about 1999 - 1994, which cancels in float32; there a
    series in `x = -t log(beta)` is used.
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
    length = jnp.maximum(_average_length(beta, count), 5)  # for smaller lengths the result is not used
    factor = (length - 4) * (length - 2) * infinite / ((infinite - 4) * (infinite - 2) * length)
    return jnp.sqrt(factor * common.bias_correction(beta, count))
