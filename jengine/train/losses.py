"""Reduce the named losses of a model to the total that is minimized."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.data.masking import get_mask
from jengine.model.autocast import at_least_float32
from jengine.optim.gradients import loss_names


def total_loss(losses: Mapping[str, Any], batch: Any = None) -> tuple[jax.Array, OrderedDict[str, jax.Array]]:
    """Reduce each loss to a scalar and add up the losses to minimize.

    Args:
      losses: name -> array of any shape (its mean), `(sum, weight)` (their quotient), or a list (the sum of its
        entries). If the batch has a mask bool[B] (see `get_mask`), an array whose first axis has the size B is averaged
        over the real examples.
      batch: the batch of the losses.

    Returns:
      The total, f32[], which is the sum of the entries with 'loss' in their name; and every entry as f32[], with the
      total as 'loss' first. A float64 loss is reduced in float64. JAX keeps the order of an OrderedDict, but sorts the
      keys of a dict.

    Raises:
      ValueError: see `loss_names`.
    """
    mask = get_mask(batch)
    reduced = {name: _reduce(value, mask) for name, value in losses.items()}
    first, *others = (reduced[name] for name in loss_names(losses))
    total = sum(others, start=first)
    parts = {name: value for name, value in reduced.items() if name != "loss"}
    return total, OrderedDict({"loss": total, **parts})


def loss_weight(losses: Mapping[str, Any], batch: Any = None) -> jax.Array | None:
    """Return the weight of a batch for averaging its mean losses with those of other batches.

    With it a loss given as `(sum, weight)` is divided once, by the weight of all batches. Other losses get the same
    weight. Without such a loss, the weight of a batch that may be padded is the number of its real examples.

    Args:
      losses: see `total_loss`.
      batch: the batch of the losses.

    Returns:
      f32[], the weight; None for equal weights.

    Raises:
      ValueError: losses with different weights.
    """
    weights: dict[Any, tuple[str, Any]] = {}
    for name, value in losses.items():
        for part in value if isinstance(value, list) else [value]:
            if "loss" in name and isinstance(part, tuple):
                weight = part[1]
                key = float(weight) if isinstance(weight, int | float | np.generic) else id(weight)
                weights.setdefault(key, (name, weight))
    if len(weights) > 1:
        (one, _), (other, _), *_ = weights.values()
        raise ValueError(
            f"the losses {one!r} and {other!r} must have the same weight, so that their gradients can be averaged over "
            "several iterations or replicas in one sum, got different arrays; use one array for both"
        )
    if weights:
        _, weight = next(iter(weights.values()))
        return jax.lax.stop_gradient(at_least_float32(weight))
    mask = get_mask(batch)
    return None if mask is None else jnp.asarray(mask, jnp.float32).sum()


def mean_over_replicas(
    metrics: OrderedDict[str, jax.Array], weight: jax.Array | None, axis_name: str
) -> OrderedDict[str, jax.Array]:
    """Return the mean of the losses over the replicas of a mapped axis, with the weights of their gradients."""
    if weight is None:
        return jax.lax.pmean(metrics, axis_name)
    weighted = OrderedDict((name, value * weight) for name, value in metrics.items())
    sums, total = jax.lax.psum((weighted, weight), axis_name)
    return OrderedDict((name, value / jnp.maximum(total, 1e-12)) for name, value in sums.items())


def _reduce(value: Any, mask: jax.Array | None) -> jax.Array:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"a loss given as a tuple must be (sum, weight), got {len(value)} entries")
        return at_least_float32(value[0]) / jnp.maximum(at_least_float32(value[1]), 1e-12)
    if isinstance(value, list):
        return sum((_reduce(v, mask) for v in value), start=jnp.zeros((), jnp.float32))
    value = at_least_float32(value)
    if mask is None or value.ndim == 0 or value.shape[0] != mask.shape[0]:
        return value.mean()
    per_example = value.mean(axis=tuple(range(1, value.ndim)))  # a reshape would not work with explicit mesh axes
    mask = mask.astype(bool)
    return jnp.where(mask, per_example, 0.0).sum() / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)
