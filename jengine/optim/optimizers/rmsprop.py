"""RMSprop as torch.optim.RMSprop defines it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.optim.optimizers.sgd import momentum_parts
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def RMSprop(
    lr: float = 1e-2,
    alpha: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum: float = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build RMSprop (Hinton, lecture notes), centered as in Graves (arXiv:1308.0850), with coupled weight decay.

    The learning rate multiplies behind the momentum, so that a schedule acts at once; in `optax.rmsprop` before it.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("RMSprop", lr=lr, alpha=alpha, eps=eps, weight_decay=weight_decay, momentum=momentum)
    settings = {
        "lr": lr,
        "alpha": alpha,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "centered": centered,
        "maximize": maximize,
    }
    numbers = ("lr", "alpha", "eps", "weight_decay", "momentum")
    return Optimizer("RMSprop", settings, _parts, numbers, absent_at_zero=("weight_decay", "momentum"))


def _parts(lr: Any, alpha: Any, eps: Any, weight_decay: Any, momentum: Any, centered: bool, maximize: bool) -> Parts:
    if centered:
        scale: Parts = [("scale_by_stddev", scale_by_stddev(alpha, eps))]
    else:
        scale = [("scale_by_rms", optax.scale_by_rms(alpha, eps, eps_in_sqrt=False))]
    scale = [*scale, *momentum_parts(momentum, dampening=0, nesterov=False)]
    return core.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)


class StddevState(NamedTuple):
    """Hold the state of centered RMSprop."""

    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares


def scale_by_stddev(decay: Any, eps: Any) -> optax.GradientTransformation:
    """Divide gradients by their standard deviation.

    `optax.scale_by_stddev` gives NaN where rounding makes a variance negative.

    Args:
      decay: decay of the means of gradients and of their squares.
      eps: added to the standard deviation.
    """

    def init(params: Tree) -> StddevState:
        return StddevState(core.zeros_like(params), core.zeros_like(params))

    def update(grads: Tree, state: StddevState, params: Tree = None) -> tuple[Tree, StddevState]:
        mu = core.moving_average(state.mu, decay, grads)
        nu = core.moving_average_of_squares(state.nu, decay, grads)
        updates = jax.tree.map(lambda g, m, v: g / (jnp.sqrt(jnp.maximum(v - m * m, 0)) + eps), grads, mu, nu)
        return updates, StddevState(mu, nu)

    return optax.GradientTransformation(init, update)
