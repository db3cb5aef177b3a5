"""Adam and AdamW with the formulas of torch.optim."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Updates

from jengine.config.annotations import Decay, NonNegative
from jengine.config.registry import OPTIMIZERS
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import Optimizer, define_optimizer


@define_optimizer("lr", "betas", "eps", "weight_decay", decay="coupled")
def Adam(
    lr: NonNegative = 1e-3,
    betas: tuple[Decay, Decay] = (0.9, 0.999),
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    amsgrad: bool = False,
    maximize: bool = False,
    decoupled_weight_decay: bool = False,
) -> Parts:
    """Build Adam (Kingma and Ba, arXiv:1412.6980), with AMSGrad (Reddi et al., arXiv:1904.09237).

    Args:
      lr: learning rate.
      betas: decay rates for the averages of gradients and squared gradients.
      eps: added to the denominator.
      weight_decay: weight decay coefficient.
      amsgrad: divide by the largest average of squares so far.
      maximize: maximize the loss.
      decoupled_weight_decay: decay the parameters directly, as AdamW does, instead of through the
        gradient.
    """
    name, scale = (
        ("scale_by_amsgrad", scale_by_amsgrad) if amsgrad else ("scale_by_adam", scale_by_adam)
    )
    return [(name, scale(*betas, eps))]


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

    >>> AdamW(lr=0.01).defaults["decoupled_weight_decay"]
    True

    Args:
      lr, betas, eps, weight_decay, amsgrad, maximize: see `Adam`.
    """
    # One implementation: AdamW is a setting of Adam, and only its name in logs and checkpoints
    # differs.
    return dataclasses.replace(
        Adam(lr, betas, eps, weight_decay, amsgrad, maximize, True), name="AdamW"
    )


def scale_by_moments(
    b1: Scalar,
    b2: Scalar,
    rescale: Callable[..., tuple[Any, ...]],
    state_type: type[Any] = optax.ScaleByAdamState,
    init_memory: Callable[[Any], tuple[Any, ...]] = lambda params: (),
) -> optax.GradientTransformation:
    """Build a relative of Adam from the averages of gradients and squared gradients.

    Args:
      b1, b2: decay of gradients and of squares.
      rescale: `(count, grads, mu, nu, *memory) -> (updates, *memory)`.
      state_type: NamedTuple with the fields count, mu and nu, then the memory.
      init_memory: returns the first memory, what the optimizer keeps besides the averages.
    """

    def init(params: Any) -> Any:
        # By position: optax has no common base of these states, but all of them start with count,
        # mu and nu.
        return state_type(*init_moments(params), *init_memory(params))

    def update(
        grads: Updates, state: OptState, params: Any | None = None
    ) -> tuple[Updates, OptState]:
        old_count, mu, nu, *memory = state
        count = old_count + 1
        mu = common.moving_average(mu, b1, grads)
        nu = common.moving_average_of_squares(nu, b2, grads)
        updates, *memory = rescale(count, grads, mu, nu, *memory)
        return updates, state_type(count, mu, nu, *memory)

    return optax.GradientTransformation(init, update)


def init_moments(params: Any) -> optax.ScaleByAdamState:
    """Return Adam's initial state."""
    return optax.ScaleByAdamState(
        common.zero_count(), common.zeros_like(params), common.zeros_like(params)
    )


def scale_by_adam(b1: Scalar, b2: Scalar, eps: Scalar) -> optax.GradientTransformation:
    """Rescale gradients by Adam, with the state of `optax.scale_by_adam`.

    `optax.scale_by_adam` computes `1 - b2**count` in float32 without `expm1`: updates have a
    relative error up to 4e-5 (here 2e-6), or 6e-6 for a traced b2. Also, compilers may round the
    mean square differently inside a `lax.scan`, so that steps in chunks would differ from single
    steps in the last bit.
    """

    def rescale(count: jax.Array, grads: Updates, mu: Updates, nu: Updates) -> tuple[Updates]:
        return (divide_corrected(b1, b2, eps, count, mu, nu),)

    return scale_by_moments(b1, b2, rescale)


def scale_by_amsgrad(b1: Scalar, b2: Scalar, eps: Scalar) -> optax.GradientTransformation:
    """Rescale gradients by AMSGrad, with the state of `optax.scale_by_amsgrad`.

    optax takes the maximum after the bias correction; as in PyTorch, it is taken before.
    """

    def rescale(
        count: jax.Array, grads: Updates, mu: Updates, nu: Updates, nu_max: Updates
    ) -> tuple[Updates, Updates]:
        nu_max = jax.tree.map(jnp.maximum, nu_max, nu)
        return divide_corrected(b1, b2, eps, count, mu, nu_max), nu_max

    return scale_by_moments(
        b1, b2, rescale, optax.ScaleByAmsgradState, lambda params: (common.zeros_like(params),)
    )


def divide_corrected(
    b1: Scalar, b2: Scalar, eps: Scalar, count: jax.Array, mu: Updates, nu: Updates
) -> Updates:
    """Return Adam's update from its averages, after `count` updates."""
    # torch's order of operations: the root before its bias correction
    first = common.bias_correction(b1, count)
    second = jnp.sqrt(common.bias_correction(b2, count))
    return jax.tree.map(lambda m, v: m / first / (jnp.sqrt(v) / second + eps), mu, nu)
