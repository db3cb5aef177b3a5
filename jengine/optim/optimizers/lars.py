"""LARS as MMSelfSup defines it."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.optim.optimizers.sgd import momentum_parts
from jengine.optim.transforms.groups import by_leaf
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def LARS(
    lr: float,
    momentum: float = 0.0,
    weight_decay: float = 0.0,
    dampening: float = 0.0,
    eta: float = 0.001,
    nesterov: bool = False,
    eps: float = 1e-8,
) -> Optimizer:
    """Build layer-wise adaptive rate scaling (You et al., arXiv:1708.03888). Without momentum it holds no state.

    The learning rate is inside the momentum, other than in SGD. A group setting `lars_exclude=True` switches the trust
    ratio off; decay then still acts.

    Args:
      lr: learning rate.
      momentum: momentum.
      weight_decay: coupled decay, inside the trust ratio.
      dampening: the part of a gradient that does not enter the momentum.
      eta: factor of the trust ratio.
      nesterov: look ahead.
      eps: added to the norm that divides.

    Raises:
      ValueError: a negative setting, or nesterov without momentum or with dampening.
    """
    core.in_range("LARS", lr=lr, momentum=momentum, weight_decay=weight_decay, eta=eta, eps=eps)
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError(
            f"LARS: nesterov needs momentum above 0 and dampening 0, found momentum={momentum}, dampening={dampening}"
        )
    settings = {
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "dampening": dampening,
        "eta": eta,
        "nesterov": nesterov,
        "eps": eps,
        "lars_exclude": False,
    }
    return Optimizer(
        "LARS",
        settings,
        _parts,
        numbers=("lr", "momentum", "weight_decay", "dampening", "eta", "eps", "lars_exclude"),
        by_leaf=("lr", "weight_decay", "lars_exclude"),
        absent_at_zero=("weight_decay", "momentum", "dampening"),
        whole_tensor=True,
    )


def _parts(
    lr: Any, momentum: Any, weight_decay: Any, dampening: Any, eta: Any, nesterov: bool, eps: Any, lars_exclude: Any
) -> Parts:
    scale = scale_by_lars(lr, weight_decay, eta, eps, lars_exclude)
    return [("scale_by_lars", scale), *momentum_parts(momentum, dampening, nesterov), ("descent", optax.scale(-1.0))]


def scale_by_lars(
    learning_rate: Any, weight_decay: Any, eta: Any, eps: Any, exclude: Any = False
) -> optax.GradientTransformation:
    """Decay gradients, and multiply them by the learning rate and the trust ratio of their tensor.

    The ratio is `eta |w| / (|g| + weight_decay |w| + eps)`, and 1 where a norm is 0; `optax.lars` takes the norm of
    `g + weight_decay w` instead.

    Args:
      learning_rate: a number, or a tree of numbers like the parameters.
      weight_decay: likewise.
      eta: factor of the ratio.
      eps: added to the norm that divides.
      exclude: where it is not 0 the ratio is 1; a number, or a tree of numbers like the parameters.
    """

    def leaf(g: Any, p: Any, lr: Any, decay: Any, excluded: Any) -> jax.Array:
        p_norm, g_norm = core.norm(p), core.norm(g)
        trust = eta * p_norm / (g_norm + decay * p_norm + eps)
        trust = jnp.where((excluded != 0) | (p_norm == 0) | (g_norm == 0), 1, trust)
        return (g + decay * p) * (lr * trust)

    def update(grads: Tree, params: Tree) -> Tree:
        params = core.need_params("LARS", params)
        numbers = (by_leaf(number, params) for number in (learning_rate, weight_decay, exclude))
        return jax.tree.map(leaf, grads, params, *numbers)

    return optax.stateless(update)
