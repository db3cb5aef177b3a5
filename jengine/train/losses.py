"""From what a model calls its losses to the one number that is minimised."""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp


def total_loss(losses: Mapping[str, Any], batch: Any = None) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Reduces each loss to a scalar and adds up those that are minimised.

    Args:
      losses: name -> array of any shape (its mean), `(sum, weight)` (their quotient), or a list (the sum of its
        entries). Where the batch has a `mask` bool[B], an array with B as its first axis is averaged over the
        examples that are real.
      batch: the batch that the losses are of.

    Returns:
      The total, f32[]: the sum of the entries with 'loss' in their name; and every entry as f32[], the total among
      them as 'loss'.

    Raises:
      ValueError: no entry has 'loss' in its name.
    """
    mask = batch.get("mask") if isinstance(batch, Mapping) else None
    reduced = {name: _reduce(value, mask) for name, value in losses.items()}
    minimised = [value for name, value in reduced.items() if "loss" in name]
    if not minimised:
        raise ValueError(f"nothing to minimise: no loss has 'loss' in its name, found {sorted(losses)}")
    total = sum(minimised[1:], start=minimised[0])
    return total, {**reduced, "loss": total}


def _reduce(value: Any, mask: jax.Array | None) -> jax.Array:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(f"a loss given as a tuple is (sum, weight), found {len(value)} entries")
        return jnp.asarray(value[0], jnp.float32) / jnp.maximum(jnp.asarray(value[1], jnp.float32), 1e-12)
    if isinstance(value, list):
        return sum((_reduce(v, mask) for v in value), start=jnp.zeros((), jnp.float32))
    value = jnp.asarray(value, jnp.float32)
    if mask is None or value.ndim == 0 or value.shape[0] != mask.shape[0]:
        return value.mean()
    per_example = value.reshape(value.shape[0], -1).mean(axis=1)
    weight = mask.astype(jnp.float32)
    return (per_example * weight).sum() / jnp.maximum(weight.sum(), 1.0)
