"""Gradients of a loss with respect to the trainable parameters."""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from optax import Updates

from jengine.optim.param_groups.param_group import GroupLayout


def value_and_trainable_grad(
    loss_fn: Callable[[Any], Any],
    params: Any,
    layout: GroupLayout,
    *,
    has_aux: bool,
    scale_loss: Callable[[jax.Array], jax.Array],
    axis_name: str | None,
) -> tuple[Any, Updates]:
    """Return the unscaled output of `loss_fn`, and the gradients of the scaled loss, zeros for
    frozen parameters.

    Args:
      loss_fn: `params -> loss`, or `(loss, aux)` with `has_aux`; see `sum_losses` for a loss that
        is a dict.
      params, layout: the parameters and the groups; frozen parameters are not differentiated.
      has_aux: see loss_fn.
      scale_loss: applied to the loss before differentiation.
      axis_name: mapped axis around the call; gradients are not averaged over it.
    """

    def compute_scaled_loss(trainable: Any) -> tuple[jax.Array, Any]:
        outputs = loss_fn(layout.combine(trainable, params))
        # The unscaled outputs are the aux of the scaled loss.
        return scale_loss(sum_losses(outputs[0] if has_aux else outputs)), outputs

    # Frozen parameters are None here, which JAX does not differentiate: their gradients are never
    # computed.
    trainable = layout.trainable(params)
    if axis_name is not None:
        # otherwise jax.shard_map sums the gradients of replicated parameters over the replicas
        trainable = jax.tree.map(lambda p: jax.lax.pcast(p, axis_name, to="varying"), trainable)
    (_, outputs), grads = jax.value_and_grad(compute_scaled_loss, has_aux=True)(trainable)
    return outputs, layout.combine(grads, jax.tree.map(jnp.zeros_like, params))


def sum_losses(loss: Any) -> jax.Array:
    """Return the loss; for a dict the summed means of the entries whose names contain 'loss', as
    in MMEngine.
    """
    if not isinstance(loss, Mapping):
        return loss
    first, *others = (jnp.mean(loss[name]) for name in loss_names(loss))
    return sum(others, start=first)


def loss_names(losses: Mapping[str, Any]) -> list[str]:
    """Return the names of the entries that are minimized: those that contain 'loss'.

    >>> loss_names({"loss_cls": 1.0, "accuracy": 0.5, "aux_loss": 2.0})
    ['loss_cls', 'aux_loss']

    Raises:
      ValueError: there is none; or 'loss' is one of several, which is usually the sum and would
        count twice.
    """
    names = [name for name in losses if "loss" in name]
    if not names:
        raise ValueError(
            f"a loss must have 'loss' in its name, got {sorted(losses)}; there is nothing to "
            "minimize"
        )
    # Torch models return the total as `loss` beside its parts, MMEngine sums all names with 'loss':
    # the gradient would be twice as large, and nothing would show it.
    if len(names) > 1 and "loss" in names:
        parts = [name for name in names if name != "loss"]
        renamed = [
            name.replace("_loss", "").replace("loss_", "").replace("loss", "part") for name in parts
        ]
        raise ValueError(
            f"'loss' must be the only entry with 'loss' in its name, got {parts} too: all of them "
            "are added up, and a total would count twice. If 'loss' is the total, rename the "
            f"parts, which are then only logged ({renamed}), or drop 'loss', and the sum of the "
            "parts is logged as 'loss'; if it is a part, rename it: 'main_loss'"
        )
    return names
