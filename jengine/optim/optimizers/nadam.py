"""NAdam as torch.optim.NAdam defines it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jengine.optim import core
from jengine.optim.core import Core, Numbers, Optimizer, Tree
from jengine.registry import OPTIMIZERS


class NAdamState(NamedTuple):
    """State of NAdam."""

    steps: jax.Array  # int32[], updates done
    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares
    momentum_product: Tree  # float32[] a leaf: product of all momenta so far


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
    """Adam with Nesterov momentum (Dozat, ICLR workshop 2016) and its schedule of momenta, which optax leaves out.

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
    return Optimizer("NAdam", settings, _plan, whole_tensor=True)


def _plan(groups: Sequence[Mapping[str, Any]]) -> Core:
    decoupled = core.shared_flag("NAdam", groups, "decoupled_weight_decay")
    maximize = core.shared_flag("NAdam", groups, "maximize")

    def init(params: Tree) -> NAdamState:
        product = jax.tree.map(lambda p: jnp.ones((), core.state_dtype(p.dtype)), params)
        return NAdamState(core.step_zero(), core.zeros_like(params), core.zeros_like(params), product)

    def update(grads: Tree, state: NAdamState, params: Tree, hp: Numbers) -> tuple[Tree, NAdamState]:
        """Adam's moments, with the momentum of the step to come."""
        grads = core.negate(grads) if maximize else grads
        if not decoupled:
            grads = core.add_decay(grads, params, hp["weight_decay"])
        steps = state.steps + 1
        momentum = _momentum(hp, steps)
        following = _momentum(hp, steps + 1)
        product = jax.tree.map(jnp.multiply, state.momentum_product, momentum)
        mu = core.mean(state.mu, hp["beta1_complement"], grads)
        nu = core.mean_of_squares(state.nu, hp["beta2_complement"], grads)
        correction = core.bias_correction(hp["beta2_complement"], steps)

        def leaf(lr: Any, eps: Any, m: Any, v: Any, g: Any, now: Any, then: Any, prod: Any, bc: Any) -> jax.Array:
            denominator = jnp.sqrt(v / bc) + eps
            return -(lr * (1 - now) / (1 - prod) * g + lr * then / (1 - prod * then) * m) / denominator

        updates = jax.tree.map(leaf, hp["lr"], hp["eps"], mu, nu, grads, momentum, following, product, correction)
        if decoupled:
            updates = core.add_decoupled_decay(updates, params, hp)
        return updates, NAdamState(steps, mu, nu, product)

    return Core(init, update, core.numbers_of("lr", "betas", "eps", "weight_decay", "momentum_decay"))


def _momentum(hp: Numbers, step: jax.Array) -> Tree:
    return core.per_group(
        lambda c, decay: (1 - c) * (1 - 0.5 * 0.96 ** (step.astype(c.dtype) * decay)),
        hp["beta1_complement"],
        hp["momentum_decay"],
    )
