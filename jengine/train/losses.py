"""Named model losses, and the total that is minimized."""

from collections import OrderedDict
from collections.abc import Mapping
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jengine.data.batch_check import Batch
from jengine.data.masking import are_whole, get_mask
from jengine.model.autocast import at_least_float32
from jengine.optim.gradients import loss_names

T = TypeVar("T")


def total_loss(
    losses: Mapping[str, Any], batch: Batch = None
) -> tuple[jax.Array, OrderedDict[str, jax.Array]]:
    """Reduce each loss to a scalar and add up the losses to minimize.

    >>> total, parts = total_loss(
    ...     {"loss_cls": jnp.array([1.0, 3.0]), "loss_box": (6.0, 3.0), "accuracy": 0.5}
    ... )
    >>> total.item(), {name: value.item() for name, value in parts.items()}
    (4.0, {'loss': 4.0, 'loss_cls': 2.0, 'loss_box': 2.0, 'accuracy': 0.5})

    Args:
      losses: name -> array of any shape (which is averaged), `(sum, weight)` (which are divided),
        or a list (which is added up). If the batch has a mask bool[B] (see `get_mask`), an array
        whose first axis has the size B is averaged over the real examples.
      batch: the batch.

    Returns:
      The total, f32[], over the entries with 'loss' in the name; and every entry as f32[], with the
      total as 'loss' first. A float64 loss is reduced in float64. JAX keeps the order of an
      OrderedDict, but sorts dict keys.

    Raises:
      ValueError: see `loss_names`. TypeError: a loss that is a dict.
    """
    mask = get_mask(batch)
    for name, value in losses.items():
        if isinstance(value, Mapping):
            raise TypeError(
                f"the loss {name!r} must be an array, (sum, weight) or a list of these, got the "
                f"dict {value}"
            )
    reduced = {name: _reduce(value, mask) for name, value in losses.items()}
    first, *others = (reduced[name] for name in loss_names(losses))
    total = sum(others, start=first)
    # the total has this name
    parts = {name: value for name, value in reduced.items() if name != "loss"}
    return total, OrderedDict({"loss": total, **parts})


def loss_weight(losses: Mapping[str, Any], batch: Batch = None) -> jax.Array | None:
    """Return the weight, f32[], for averaging mean losses over several batches.

    None for equal weights.

    With it a loss given as `(sum, weight)` is divided once, by the weight of all batches. Other
    losses get the same weight. Without such a loss, a batch that may be padded has the number of
    real examples as weight. The arguments are those of `total_loss`.

    Raises:
      ValueError: losses with different weights.
    """
    weights: dict[Any, tuple[str, Any]] = {}
    for name, value in losses.items():
        for part in value if isinstance(value, list) else [value]:
            if "loss" in name and isinstance(part, tuple):
                weight = part[1]
                # values of traced arrays are unknown: two of them are equal only if they are the
                # same array
                key = float(weight) if isinstance(weight, int | float | np.generic) else id(weight)
                weights.setdefault(key, (name, weight))
    if len(weights) > 1:
        (one, _), (other, _), *_ = weights.values()
        raise ValueError(
            f"the losses {one!r} and {other!r} must have the same weight, so that their gradients "
            "can be averaged over several iterations or replicas in one sum, got different "
            "arrays; use one array for both"
        )
    if weights:
        _, weight = next(iter(weights.values()))
        return jax.lax.stop_gradient(at_least_float32(weight))  # it may be computed by the model
    mask = get_mask(batch)
    return None if mask is None else jnp.asarray(mask, jnp.float32).sum()


def example_weight(batch: Batch) -> jax.Array | None:
    """Return the number of examples, f32[], which weighs a batch in a mean over batches of several
    sizes.

    It is the leading axis that all arrays share; None if they do not, or with `batch_axis=None`.
    """
    sizes = {jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(batch)}
    if are_whole() or len(sizes) != 1 or () in sizes:
        return None
    return jnp.float32(sizes.pop()[0])


def mean_over_replicas(tree: T, weight: jax.Array | None, axis_name: str) -> T:
    """Return the mean of losses or gradients over the replicas on a mapped axis, with the
    replicas' weights.
    """
    if weight is None:
        return jax.lax.pmean(tree, axis_name)
    weighted = jax.tree.map(lambda value: value * weight.astype(value.dtype), tree)
    sums, total = jax.lax.psum((weighted, weight), axis_name)
    return jax.tree.map(lambda value: value / jnp.maximum(total, 1e-12).astype(value.dtype), sums)


def _reduce(value: Any, mask: jax.Array | None) -> jax.Array:
    if isinstance(value, tuple):
        if len(value) != 2:
            raise ValueError(
                f"a loss given as a tuple must be (sum, weight), got {len(value)} entries"
            )
        # A batch may have no weight at all, such as one without boxes
        return at_least_float32(value[0]) / jnp.maximum(at_least_float32(value[1]), 1e-12)
    if isinstance(value, list):
        return sum((_reduce(v, mask) for v in value), start=jnp.zeros((), jnp.float32))
    value = at_least_float32(value)
    if mask is None or value.ndim == 0 or value.shape[0] != mask.shape[0]:
        return value.mean()
    # a reshape would not work with explicit mesh axes
    per_example = value.mean(axis=tuple(range(1, value.ndim)))
    mask = mask.astype(bool)
    return jnp.where(mask, per_example, 0.0).sum() / jnp.maximum(mask.sum(dtype=jnp.float32), 1.0)
