"""Learning rates and weight decays that differ between parameters."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import jax
import jax.numpy as jnp
import optax
from optax import OptState, Updates

# a number for all parameters, or a tree like the parameters (or a prefix of it) of numbers and
# broadcastable arrays, or a function from the parameters to such a tree
PerParameter: TypeAlias = Any | Callable[[Any], Any]


class GroupHyperparamsState(NamedTuple):
    """Group hyperparameters, which may be set between two updates, and a chain's state."""

    hyperparams: dict[str, jax.Array]  # float32[] by name; float32[G] for G groups
    inner_state: OptState


def add_decayed_weights_by_rule(weight_decay: PerParameter) -> optax.GradientTransformation:
    """Add `weight_decay` times the parameters to the updates, with a separate weight decay for each
    parameter.

    Before `scale_by_adam` this is Adam's coupled (L2) decay, after it AdamW's decoupled decay.

    >>> import jax.numpy as jnp
    >>> params = {"kernel": jnp.ones(2), "bias": jnp.ones(1)}
    >>> tx = add_decayed_weights_by_rule({"kernel": 0.5, "bias": 0.0})
    >>> updates, _ = tx.update(jax.tree.map(jnp.zeros_like, params), tx.init(params), params)
    >>> updates["kernel"].tolist(), updates["bias"].tolist()
    ([0.5, 0.5], [0.0])

    Args:
      weight_decay: a number for all parameters; a tree of numbers like the parameters (or a prefix
        of it), such as `wrapper.weight_decays(params)`; or a function that returns such a tree for
        the parameters.
    """

    def update(updates: Updates, params: Any | None) -> Updates:
        if params is None:
            raise ValueError(
                "`params` must be given for weight decay, got None; call update(grads, state, "
                "params)"
            )
        # While tracing: a function of the parameters is called with tracers and may look at shapes
        # and paths.
        decays = broadcast_to_params(weight_decay, params)
        return jax.tree.map(lambda u, wd, p: u + wd * p, updates, decays, params)

    return optax.stateless(update)


def scale_by_group_learning_rate(
    learning_rate: PerParameter, *, flip_sign: bool = True
) -> optax.GradientTransformation:
    """Multiply the updates by minus each parameter's learning rate.

    Args:
      learning_rate: like `weight_decay` of `add_decayed_weights_by_rule`; for example a learning
        rate times `wrapper.learning_rate_multipliers(params)`.
      flip_sign: whether to multiply by minus the rate, for descent.
    """
    sign = -1 if flip_sign else 1

    def update(updates: Updates, params: Any | None) -> Updates:
        rates = broadcast_to_params(learning_rate, updates if params is None else params)
        # In the dtype of the update: a float32 rate would promote bfloat16 updates.
        return jax.tree.map(lambda u, lr: sign * jnp.asarray(lr, u.dtype) * u, updates, rates)

    return optax.stateless(update)


def broadcast_to_params(value: PerParameter, tree: Any) -> Any:
    """Return numbers in a tree like `tree` from a number, a prefix tree, or a function from
    trees to numbers.
    """
    # a module of Equinox is a tree, and has a `__call__`
    if callable(value) and jax.tree_util.all_leaves([value]):
        value = value(tree)
    return jax.tree.broadcast(value, tree) if jax.tree.leaves(tree) else tree
