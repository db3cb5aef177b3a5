"""NAdam as torch.optim.NAdam defines it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def NAdam(
    lr: float = 2e-3,
    betas: Sequence[float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    momentum_decay: float = 4e-3,
    decoupled_weight_decay: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build Adam with Nesterov momentum (Dozat, ICLR workshop 2016).

    Args:
      lr: learning rate.
      betas: decay of the means of gradients and of their squares.
      eps: added to the root of the squares.
      weight_decay: decay.
      momentum_decay: how fast the momentum rises to `betas[0]` from half of it.
      decoupled_weight_decay: decay as AdamW does.
      maximize: climb.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("NAdam", lr=lr, eps=eps, weight_decay=weight_decay, momentum_decay=momentum_decay)
    settings = {
        "lr": lr,
        "betas": core.betas_in_range("NAdam", betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum_decay": momentum_decay,
        "decoupled_weight_decay": decoupled_weight_decay,
        "maximize": maximize,
    }
    numbers = ("lr", "betas", "eps", "weight_decay", "momentum_decay")
    return Optimizer("NAdam", settings, _parts, numbers)


def _parts(
    lr: Any, betas: Any, eps: Any, weight_decay: Any, momentum_decay: Any, decoupled_weight_decay: bool, maximize: bool
) -> Parts:
    b1, b2 = betas
    scale = [("scale_by_nadam", scale_by_nadam(b1, b2, eps, momentum_decay))]
    return core.chain_with_decay(scale, lr, weight_decay, decoupled=decoupled_weight_decay, maximize=maximize)


class NadamState(NamedTuple):
    """Hold the state of NAdam."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares
    momentum_product: jax.Array  # float32[], product of all momenta so far


def scale_by_nadam(b1: Any, b2: Any, eps: Any, momentum_decay: Any) -> optax.GradientTransformation:
    """Rescale gradients by NAdam with its schedule of momenta, which `optax.scale_by_adam(nesterov=True)` leaves out.

    Args:
      b1: the momentum in the end, and decay of the mean of gradients.
      b2: decay of the mean of their squares.
      eps: added to the root.
      momentum_decay: how fast the momentum rises to b1 from half of it.
    """

    def momentum(count: jax.Array) -> jax.Array:
        return b1 * (1 - 0.5 * 0.96 ** (count * momentum_decay))

    def init(params: Tree) -> NadamState:
        product = jnp.ones((), jnp.float32)
        return NadamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params), product)

    def update(grads: Tree, state: NadamState, params: Tree = None) -> tuple[Tree, NadamState]:
        count = state.count + 1
        mu = core.moving_average(state.mu, b1, grads)
        nu = core.moving_average_of_squares(state.nu, b2, grads)
        now, following = momentum(count), momentum(count + 1)
        product = state.momentum_product * now
        of_grad, of_mean = (1 - now) / (1 - product), following / (1 - product * following)
        second = core.bias_correction(b2, count)
        updates = jax.tree.map(
            lambda g, m, v: (of_grad * g + of_mean * m) / (jnp.sqrt(v / second) + eps), grads, mu, nu
        )
        return updates, NadamState(count, mu, nu, product.astype(state.momentum_product.dtype))

    return optax.GradientTransformation(init, update)
