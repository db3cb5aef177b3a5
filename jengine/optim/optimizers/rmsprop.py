"""Define RMSprop and Rprop with the formulas of torch.optim."""

from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jengine.annotations import Fraction, NonNegative, Range
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Tree
from jengine.optim.optimizers.optimizer import Optimizer
from jengine.optim.optimizers.sgd import momentum_parts
from jengine.optim.transforms.groups import broadcast_to_params
from jengine.registry import OPTIMIZERS


@OPTIMIZERS.register_module()
def RMSprop(
    lr: NonNegative = 1e-2,
    alpha: Fraction = 0.99,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    momentum: Fraction = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Optimizer:
    """Build RMSprop (Hinton, lecture notes), centered as in Graves (arXiv:1308.0850), with coupled weight decay.

    The learning rate is applied after the momentum, so that a schedule takes effect at once; `optax.rmsprop` applies it
    before.

    Args:
      lr: learning rate.
      alpha: decay rate of the average of squares.
      eps: added to the denominator.
      weight_decay: coefficient of the weight decay.
      momentum: decay rate of the momentum; 0 for none.
      centered: divide by the standard deviation instead of the root mean square.
      maximize: maximize the loss.

    Raises:
      ValueError: a setting outside its range.
    """
    settings = {
        "lr": lr,
        "alpha": alpha,
        "eps": eps,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "centered": centered,
        "maximize": maximize,
    }
    hyperparams = ("lr", "alpha", "eps", "weight_decay", "momentum")
    return Optimizer("RMSprop", settings, _rmsprop_parts, hyperparams, absent_at_zero=("weight_decay", "momentum"))


@OPTIMIZERS.register_module()
def Rprop(
    lr: NonNegative = 1e-2,
    etas: tuple[Annotated[float, Range(gt=0, lt=1)], Annotated[float, Range(gt=1)]] = (0.5, 1.2),
    step_sizes: tuple[NonNegative, NonNegative] = (1e-6, 50.0),
    maximize: bool = False,
) -> Optimizer:
    """Build Rprop, resilient backpropagation (Riedmiller and Braun, 1993).

    Args:
      lr: the initial step size; it has no effect later.
      etas: factors of a step size if the sign of the gradient has changed, and if it has not.
      step_sizes: the minimum and the maximum step size.
      maximize: maximize the objective.

    Raises:
      ValueError: a setting outside its range.
    """
    if len(etas) != 2 or not 0 < etas[0] < 1 < etas[1]:
        raise ValueError(f"Rprop: etas must be two numbers with 0 < first < 1 < second, got {etas!r}")
    if len(step_sizes) != 2 or not 0 <= step_sizes[0] <= step_sizes[1]:
        raise ValueError(f"Rprop: step_sizes must be a minimum and a maximum, got {step_sizes!r}")
    settings = {"lr": lr, "etas": tuple(etas), "step_sizes": tuple(step_sizes), "maximize": maximize}
    return Optimizer("Rprop", settings, _rprop_parts, ("lr", "etas", "step_sizes"))


class StddevState(NamedTuple):
    """Hold the state of centered RMSprop."""

    mu: Tree  # float32, like the parameters: mean of the gradients
    nu: Tree  # float32, like the parameters: mean of their squares


def scale_by_stddev(decay: Any, eps: Any) -> optax.GradientTransformation:
    """Divide gradients by their standard deviation.

    `optax.scale_by_stddev` returns NaN if rounding makes a variance negative.

    Args:
      decay: decay of the means of gradients and of their squares.
      eps: added to the standard deviation.
    """

    def init(params: Tree) -> StddevState:
        return StddevState(common.zeros_like(params), common.zeros_like(params))

    def update(grads: Tree, state: StddevState, params: Tree = None) -> tuple[Tree, StddevState]:
        mu = common.moving_average(state.mu, decay, grads)
        nu = common.moving_average_of_squares(state.nu, decay, grads)
        updates = jax.tree.map(lambda g, m, v: g / (jnp.sqrt(jnp.maximum(v - m * m, 0)) + eps), grads, mu, nu)
        return updates, StddevState(mu, nu)

    return optax.GradientTransformation(init, update)


class RpropState(NamedTuple):
    """Hold the state of Rprop."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    previous_grads: Tree  # float32, like the parameters: the last gradients, 0 if their sign had changed
    step_sizes: Tree  # float32, like the parameters


def scale_by_rprop(
    learning_rate: Any, eta_minus: Any, eta_plus: Any, min_step_size: Any, max_step_size: Any
) -> optax.GradientTransformation:
    """Replace gradients by their sign times a step size; `optax.scale_by_rprop` returns the update of the last step.

    Args:
      learning_rate: the initial step size, a number or a tree of numbers like the parameters.
      eta_minus: factor of a step size if the sign of the gradient has changed.
      eta_plus: factor if the sign has not changed.
      min_step_size: the minimum step size.
      max_step_size: the maximum step size.
    """

    def init(params: Tree) -> RpropState:
        return RpropState(common.zero_count(), common.zeros_like(params), common.zeros_like(params))

    def update(grads: Tree, state: RpropState, params: Tree = None) -> tuple[Tree, RpropState]:
        def leaf(g: Any, previous: Any, size: Any, lr: Any) -> tuple[Any, ...]:
            sign = jnp.sign(g * previous)
            factor = jnp.where(sign > 0, eta_plus, jnp.where(sign < 0, eta_minus, 1))
            size = jnp.clip(jnp.where(state.count == 0, lr, size) * factor, min_step_size, max_step_size)
            g = jnp.where(sign < 0, 0, g)
            return jnp.sign(g) * size, g, size

        rates = broadcast_to_params(learning_rate, grads)
        results = jax.tree.map(leaf, grads, state.previous_grads, state.step_sizes, rates)
        updates, previous_grads, step_sizes = common.unzip(results, grads, 3)
        return updates, RpropState(state.count + 1, previous_grads, step_sizes)

    return optax.GradientTransformation(init, update)


def _rmsprop_parts(
    lr: Any, alpha: Any, eps: Any, weight_decay: Any, momentum: Any, centered: bool, maximize: bool
) -> Parts:
    if centered:
        scale: Parts = [("scale_by_stddev", scale_by_stddev(alpha, eps))]
    else:
        scale = [("scale_by_rms", optax.scale_by_rms(alpha, eps, eps_in_sqrt=False))]
    scale = [*scale, *momentum_parts(momentum, dampening=0, nesterov=False)]
    return common.chain_with_decay(scale, lr, weight_decay, decoupled=False, maximize=maximize)


def _rprop_parts(lr: Any, etas: Any, step_sizes: Any, maximize: bool) -> Parts:
    scale = scale_by_rprop(lr, *etas, *step_sizes)
    return [*common.ascent_parts(maximize), ("scale_by_rprop", scale), ("descent", optax.scale(-1.0))]
