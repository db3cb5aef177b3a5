"""Averaged SGD as torch.optim.ASGD defines it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.optim import core
from jengine.optim.core import Optimizer, Parts, Tree
from jengine.optim.transforms import add_decayed_weights_by_rule
from jengine.optim.transforms.groups import by_leaf
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def ASGD(
    lr: float = 1e-2,
    lambd: float = 1e-4,
    alpha: float = 0.75,
    t0: float = 1e6,
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> Optimizer:
    """Build averaged SGD (Polyak and Juditsky, 1992). A change of lr acts one update later, as in PyTorch.

    Args:
      lr: learning rate.
      lambd: decay of the parameters.
      alpha: power of the decay of the rate.
      t0: the update at which averaging begins.
      weight_decay: coupled decay.
      maximize: climb.

    Raises:
      ValueError: a setting outside its range.
    """
    core.in_range("ASGD", lr=lr, weight_decay=weight_decay)
    settings = {
        "lr": lr,
        "lambd": lambd,
        "alpha": alpha,
        "t0": t0,
        "weight_decay": weight_decay,
        "maximize": maximize,
    }
    numbers = ("lr", "lambd", "alpha", "t0", "weight_decay")
    return Optimizer("ASGD", settings, _parts, numbers, whole_tensor=True)


def _parts(lr: Any, lambd: Any, alpha: Any, t0: Any, weight_decay: Any, maximize: bool) -> Parts:
    return [
        *core.ascent(maximize),
        ("add_decayed_weights", add_decayed_weights_by_rule(weight_decay)),
        ("averaged_sgd", averaged_sgd(lr, lambd, alpha, t0)),
    ]


class AveragedSgdState(NamedTuple):
    """Hold the state of averaged SGD."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    eta: Tree  # float32[] a leaf: the rate of the next update, made from the learning rate of this one
    average: Tree  # float32, like the parameters: their average, for the user


def averaged_sgd(learning_rate: Any, lambd: Any, alpha: Any, t0: Any) -> optax.GradientTransformation:
    """Descend with a decaying rate and average the parameters in the state, which optax does not have.

    Args:
      learning_rate: a number, or a tree of numbers like the parameters.
      lambd: decay of the parameters.
      alpha: power of the decay of the rate.
      t0: the update at which averaging begins.
    """

    def init(params: Tree) -> AveragedSgdState:
        eta = jax.tree.map(lambda p: jnp.zeros((), core.state_dtype(p.dtype)), params)
        return AveragedSgdState(core.step_zero(), eta, core.zeros_like(params))

    def update(grads: Tree, state: AveragedSgdState, params: Tree = None) -> tuple[Tree, AveragedSgdState]:
        params = core.need_params("ASGD", params)
        count = state.count + 1
        rates = by_leaf(learning_rate, params)
        eta = jax.tree.map(lambda lr, e: jnp.where(state.count == 0, lr, e), rates, state.eta)
        updates = jax.tree.map(lambda e, p, g: -e * (lambd * p + g), eta, params, grads)
        weight = 1 / jnp.maximum(1, state.count - t0)
        average = jax.tree.map(lambda a, p, u: a + weight * (p + u - a), state.average, params, updates)
        eta = jax.tree.map(lambda lr, e: (lr / (1 + lambd * lr * count) ** alpha).astype(e.dtype), rates, eta)
        return updates, AveragedSgdState(count, eta, average)

    return optax.GradientTransformation(init, update)
