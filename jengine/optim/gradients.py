"""Differentiate a loss with respect to the trainable parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jengine.optim.optimizers.common import Tree
from jengine.optim.param_groups.param_group import GroupLayout


def value_and_trainable_grad(
    loss_fn: Callable[[Tree], Any],
    params: Tree,
    layout: GroupLayout,
    *,
    has_aux: bool = False,
    scale_loss: Callable[[jax.Array], jax.Array] = lambda loss: loss,
    axis_name: str | None = None,
) -> tuple[Any, Tree]:
    """Return the value of a loss, and the gradients of the scaled loss.

    Args:
      loss_fn: `params -> loss`, or `(loss, aux)` with `has_aux`; see `sum_losses` for a loss that is a dict.
      params: the parameters.
      layout: the groups of the parameters; frozen ones are not differentiated.
      has_aux: see loss_fn.
      scale_loss: applied to the loss before differentiation.
      axis_name: mapped axis around the call; the gradients are those of one replica.

    Returns:
      The unscaled output of `loss_fn`, and gradients like `params`, zeros for frozen parameters.
    """

    def compute_scaled_loss(trainable: Tree) -> tuple[jax.Array, Any]:
        outputs = loss_fn(layout.combine(trainable, params))
        return scale_loss(sum_losses(outputs[0] if has_aux else outputs)), outputs

    trainable = layout.trainable(params)
    if axis_name is not None:
        # otherwise jax.shard_map sums the gradients of replicated parameters over the replicas
        trainable = jax.tree.map(lambda p: jax.lax.pcast(p, axis_name, to="varying"), trainable)
    (_, outputs), grads = jax.value_and_grad(compute_scaled_loss, has_aux=True)(trainable)
    return outputs, layout.combine(grads, jax.tree.map(jnp.zeros_like, params))


def sum_losses(loss: Any) -> jax.Array:
    """Return the loss; for a dict the sum of the means of the entries whose names contain 'loss', as in MMEngine.

    Raises:
      ValueError: a dict without such an entry.
    """
    if not isinstance(loss, Mapping):
        return loss
    losses = [jnp.mean(value) for name, value in loss.items() if "loss" in name]
    if not losses:
        raise ValueError(f"a dict of losses must have a name that contains 'loss', got {sorted(loss)}")
    return sum(losses[1:], start=losses[0])
