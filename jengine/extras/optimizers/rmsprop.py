"""RMSprop and Rprop with the formulas of torch.optim."""

from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import Fraction, NonNegative, Range
from jengine.extras.optimizers import trees
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer
from jengine.optim.optimizers.sgd import momentum_parts
from jengine.optim.transforms.groups import PerParameter, broadcast_to_params


@define_optimizer(
    *("lr", "alpha", "eps", "weight_decay", "momentum"),
    decay="coupled",
    absent_at_zero=("weight_decay", "momentum"),
)
def RMSprop(
    lr: NonNegative = 1e-2,
    alpha: Fraction = 0.99,
    eps: NonNegative = 1e-8,
    weight_decay: NonNegative = 0.0,
    momentum: Fraction = 0.0,
    centered: bool = False,
    maximize: bool = False,
) -> Parts:
    """Build RMSprop (Hinton, lecture notes), centered as in Graves (arXiv:1308.0850), with coupled
    weight decay.

    The learning rate is applied after the momentum, so that a schedule takes effect at once;
    `optax.rmsprop` applies it before.

    Args:
      lr: learning rate.
      alpha: decay rate for the average of squares.
      eps: added to the denominator.
      weight_decay: weight decay coefficient.
      momentum: momentum decay; 0 for none.
      centered: divide by the standard deviation instead of the root mean square.
      maximize: maximize the loss.
    """
    if centered:
        scale = ("scale_by_stddev", scale_by_stddev(alpha, eps))
    else:
        # eps outside the root, as in PyTorch; optax's default and TensorFlow have it inside.
        scale = ("scale_by_rms", optax.scale_by_rms(alpha, eps, eps_in_sqrt=False))
    return [scale, *momentum_parts(momentum, dampening=0, nesterov=False)]


def _check_step_sizes(optimizer: str, settings: Mapping[str, Any]) -> None:
    smallest, largest = settings["step_sizes"]
    if smallest > largest:
        raise ValueError(
            f"{optimizer}: step_sizes must be a minimum and a maximum, got "
            f"{settings['step_sizes']!r}"
        )


@define_optimizer("lr", "etas", "step_sizes", check=_check_step_sizes)
def Rprop(
    lr: NonNegative = 1e-2,
    etas: tuple[Annotated[float, Range(gt=0, lt=1)], Annotated[float, Range(gt=1)]] = (0.5, 1.2),
    step_sizes: tuple[NonNegative, NonNegative] = (1e-6, 50.0),
    maximize: bool = False,
) -> Parts:
    """Build Rprop, resilient backpropagation (Riedmiller and Braun, 1993).

    Args:
      lr: initial step size; it has no effect later.
      etas: step size multipliers for a gradient whose sign has changed, and for one whose sign has
        not.
      step_sizes: smallest and largest step size.
      maximize: maximize the loss.
    """
    scale = scale_by_rprop(lr, *etas, *step_sizes)
    # Rprop's steps are absolute: the rate is only their first size, and weight decay would change
    # signs alone.
    return [
        *common.ascent_parts(maximize),
        ("scale_by_rprop", scale),
        ("descent", optax.scale(-1.0)),
    ]


class StddevState(NamedTuple):
    """Centered RMSprop's state."""

    mu: Updates  # float32, like the parameters: mean gradients
    nu: Updates  # float32, like the parameters: mean squares


def scale_by_stddev(decay: Scalar, eps: Scalar) -> optax.GradientTransformation:
    """Divide gradients by the standard deviation plus eps.

    `optax.scale_by_stddev` may return NaN.
    """

    def init(params: Any) -> StddevState:
        return StddevState(common.zeros_like(params), common.zeros_like(params))

    def update(
        grads: Updates, state: StddevState, params: Any | None = None
    ) -> tuple[Updates, StddevState]:
        mu = common.moving_average(state.mu, decay, grads)
        nu = common.moving_average_of_squares(state.nu, decay, grads)
        # rounding can make a variance negative, hence the maximum
        updates = jax.tree.map(
            lambda g, m, v: g / (jnp.sqrt(jnp.maximum(v - m * m, 0)) + eps), grads, mu, nu
        )
        return updates, StddevState(mu, nu)

    return optax.GradientTransformation(init, update)


class RpropState(NamedTuple):
    """Rprop's state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    # float32, like the parameters: the last gradients, 0 if their sign had changed
    previous_grads: Updates
    step_sizes: Updates  # float32, like the parameters


def scale_by_rprop(
    learning_rate: PerParameter,
    eta_minus: Scalar,
    eta_plus: Scalar,
    min_step_size: Scalar,
    max_step_size: Scalar,
) -> optax.GradientTransformation:
    """Replace gradients by the sign times a step size.

    `optax.scale_by_rprop` returns the update of the last step.

    The arguments are those of `Rprop`; the learning rate may be a tree of numbers like the
    parameters.
    """

    def init(params: Any) -> RpropState:
        return RpropState(common.zero_count(), common.zeros_like(params), common.zeros_like(params))

    def update(
        grads: Updates, state: RpropState, params: Any | None = None
    ) -> tuple[Updates, RpropState]:
        def leaf(
            g: jax.Array, previous: jax.Array, size: jax.Array, lr: Scalar
        ) -> tuple[jax.Array, ...]:
            sign = jnp.sign(g * previous)
            factor = jnp.where(sign > 0, eta_plus, jnp.where(sign < 0, eta_minus, 1))
            size = jnp.clip(
                jnp.where(state.count == 0, lr, size) * factor, min_step_size, max_step_size
            )
            # after a sign change this step is skipped, and the next one is not shorter
            g = jnp.where(sign < 0, 0, g)
            return jnp.sign(g) * size, g, size

        rates = broadcast_to_params(learning_rate, grads)
        updates, previous_grads, step_sizes = trees.map_unzipped(
            leaf, grads, state.previous_grads, state.step_sizes, rates
        )
        return updates, RpropState(state.count + 1, previous_grads, step_sizes)

    return optax.GradientTransformation(init, update)
