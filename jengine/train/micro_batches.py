"""Gradients of a batch in parts, one after the other, where memory does not suffice for all its
examples at once.
"""

from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jengine.config.errors import ConfigError

PyTree = Any
Part = tuple[OrderedDict[str, jax.Array], PyTree, jax.Array | None]  # metrics, model state, weight
Differentiate = Callable[[PyTree, PyTree, jax.Array], tuple[Part, PyTree]]


def count_micro_batches(examples: int | None, micro_batch: int | None) -> int:
    """Return the least number of equal parts of a device's examples with at most `micro_batch`
    examples each.

    >>> count_micro_batches(64, 32), count_micro_batches(64, 24), count_micro_batches(64, None)
    (2, 4, 1)

    Raises:
      ConfigError: the number of examples is unknown.
    """
    if micro_batch is None:
        return 1
    if examples is None:
        raise ConfigError(
            "`train_cfg.micro_batch` must be None for data without a batch_size, got "
            f"{micro_batch}: the number of examples in a batch is unknown"
        )
    # The fewest parts of equal size: `lax.scan` needs equal shapes, and each part repeats the fixed
    # costs.
    return next(
        parts
        for parts in range(1, examples + 1)
        if examples % parts == 0 and examples // parts <= micro_batch
    )


def differentiate_in_parts(
    differentiate: Differentiate,
    batch: PyTree,
    model_state: PyTree,
    rng: jax.Array,
    count: int,
    axis_name: str | None,
) -> tuple[Part, PyTree]:
    """Return what `differentiate` returns for the whole batch, from `count` calls for a part of it
    each.

    Metrics and gradients are means, weighted as in `loss_weight`, so they differ from those of the
    whole batch by rounding only. The model state passes through all parts: a BatchNorm normalizes
    within each.

    Args:
      differentiate: `(batch, model_state, rng) -> ((metrics, model_state, weight), gradients)`.
      batch, model_state, rng: its arguments for the whole batch.
      count: number of parts, which divides the examples of each device.
      axis_name: mapped axis of the replicas, whose gradients differ.
    """
    parts = jax.tree.map(lambda leaf: _split(leaf, count), batch)
    shapes = jax.eval_shape(
        differentiate, jax.tree.map(lambda leaf: leaf[0], parts), model_state, rng
    )[1]

    def add(carry: Any, inputs: Any) -> Any:
        total, sums, state = carry
        index, part = inputs
        (metrics, state, weight), grads = differentiate(part, state, jax.random.fold_in(rng, index))
        # Weighted sums, divided at the end: parts may have different numbers of real examples.
        factor = jnp.ones(()) if weight is None else weight
        sums = jax.tree.map(lambda a, g: a + g * factor.astype(g.dtype), sums, grads)
        weighted = OrderedDict(
            (name, value * factor.astype(value.dtype)) for name, value in metrics.items()
        )
        # A fact of the trace, not of the data: it leaves the scan through Python.
        has_weight.append(weight is not None)
        return (total + factor, sums, state), weighted

    has_weight: list[bool] = []
    zeros = jnp.zeros(()), jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
    if axis_name is not None:
        # Under `shard_map` the carry must vary over replicas from the start, or its type changes
        # within the scan.
        zeros = jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axis_name, to="varying"), zeros)
    (total, sums, state), weighted = jax.lax.scan(
        add, (*zeros, model_state), (jnp.arange(count), parts)
    )
    # A batch of padding alone has the weight 0; 0/0 would make all parameters NaN.
    divisor = jnp.maximum(total, 1e-12)
    grads = jax.tree.map(lambda leaf: leaf / divisor.astype(leaf.dtype), sums)
    metrics = OrderedDict(
        (name, value.sum(0) / divisor.astype(value.dtype)) for name, value in weighted.items()
    )
    return (metrics, state, total if has_weight[0] else None), grads


def _split(leaf: jax.Array, count: int) -> jax.Array:
    """Return [B, ...] as [count, B / count, ...], such that each device splits the examples that
    it holds.
    """
    if leaf.shape[0] % count:
        raise ConfigError(
            f"`train_cfg.micro_batch` must divide all arrays of a batch into {count} parts, got "
            f"the shape {leaf.shape}"
        )
    return jnp.moveaxis(leaf.reshape(leaf.shape[0] // count, count, *leaf.shape[1:]), 1, 0)
