"""Averaged SGD with the formulas of torch.optim."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from optax import Updates

from jengine.config.annotations import NonNegative
from jengine.extras.optimizers import trees
from jengine.optim.optimizers import common
from jengine.optim.optimizers.common import Parts, Scalar
from jengine.optim.optimizers.optimizer import define_optimizer
from jengine.optim.transforms.groups import (
    PerParameter,
    add_decayed_weights_by_rule,
    broadcast_to_params,
)


@define_optimizer("lr", "lambd", "alpha", "t0", "weight_decay", whole_tensor=True)
def ASGD(
    lr: NonNegative = 1e-2,
    lambd: NonNegative = 1e-4,
    alpha: NonNegative = 0.75,
    t0: NonNegative = 1e6,
    weight_decay: NonNegative = 0.0,
    maximize: bool = False,
) -> Parts:
    """Build ASGD, averaged SGD (Polyak and Juditsky, 1992).

    As in PyTorch, a new lr takes effect one update later.

    Args:
      lr: learning rate.
      lambd: parameter decay.
      alpha: exponent in the rate's decay.
      t0: the update at which averaging begins.
      weight_decay: coupled weight decay.
      maximize: maximize the loss.
    """
    return [
        *common.ascent_parts(maximize),
        ("add_decayed_weights", add_decayed_weights_by_rule(weight_decay)),
        ("averaged_sgd", averaged_sgd(lr, lambd, alpha, t0)),
    ]


class AveragedSgdState(NamedTuple):
    """Averaged SGD's state."""

    count: jax.Array  # type: ignore[assignment]  # int32[], updates done
    # float32[] per leaf: the rate of the next update, computed from the current learning rate
    eta: Any
    average: Any  # float32, like the parameters: average parameters, for the user


def averaged_sgd(
    learning_rate: PerParameter, lambd: Scalar, alpha: Scalar, t0: Scalar
) -> optax.GradientTransformation:
    """Descend with a decaying rate and average the parameters in the state.

    Optax has no such transformation.

    The arguments are those of `ASGD`; the learning rate may be a tree of numbers like the
    parameters.
    """

    def init(params: Any) -> AveragedSgdState:
        eta = jax.tree.map(lambda p: jnp.zeros((), common.state_dtype(p.dtype)), params)
        return AveragedSgdState(common.zero_count(), eta, common.zeros_like(params))

    def update(
        grads: Updates, state: AveragedSgdState, params: Any | None = None
    ) -> tuple[Updates, AveragedSgdState]:
        params = trees.require_params("ASGD", params)
        count = state.count + 1
        rates = broadcast_to_params(learning_rate, params)
        # The rate of this step was computed after the last one, from the count then; the first step
        # takes `lr` itself.
        eta = jax.tree.map(lambda lr, e: jnp.where(state.count == 0, lr, e), rates, state.eta)
        updates = jax.tree.map(lambda e, p, g: -e * (lambd * p + g), eta, params, grads)
        weight = 1 / jnp.maximum(1, state.count - t0)
        # Of the parameters after this step: optax adds the updates later, so they are added here
        # for the average.
        average = jax.tree.map(
            lambda a, p, u: a + weight * (p + u - a), state.average, params, updates
        )
        # In the dtype of the state: a float64 rate would change the structure that the step was
        # compiled for.
        eta = jax.tree.map(
            lambda lr, e: (lr / (1 + lambd * lr * count) ** alpha).astype(e.dtype), rates, eta
        )
        return updates, AveragedSgdState(count, eta, average)

    return optax.GradientTransformation(init, update)
