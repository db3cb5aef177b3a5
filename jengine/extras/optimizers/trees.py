"""Maps over trees of parameters and their layers, which several optimizers share."""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from optax import Updates

from jengine.optim.optimizers import common


def map_unzipped(
    function: Callable[..., Sequence[Any]], tree: Updates, *rest: Updates
) -> tuple[Updates, ...]:
    """Map a function that returns sequences over trees like `tree`; return a tuple of trees."""
    treedef: Any = jax.tree.structure(tree)
    # Not `jax.tree.map`, whose result would have the tuples as branches, indistinguishable from
    # tuples among the parameters.
    results = [
        function(*leaves) for leaves in zip(*map(treedef.flatten_up_to, (tree, *rest)), strict=True)
    ]
    return tuple(map(treedef.unflatten, zip(*results, strict=True)))


def norm(x: jax.Array, stacked: Sequence[int] = ()) -> jax.Array:
    """Return the 2-norm over all elements, at least float32.

    With axes along which layers are `stacked`, that of each layer, in axes of size 1.
    """
    # Before the square, which overflows in float16 from 256 on.
    x = x.astype(common.state_dtype(x.dtype))
    return jnp.sqrt(jnp.sum(x * x, **layer_axes(x, stacked)))


def layer_axes(x: jax.Array, stacked: Sequence[int]) -> dict[str, Any]:
    """Return the arguments of a reduction over layers: all elements if none are stacked."""
    if not stacked:
        return {}
    return {"axis": tuple(i for i in range(x.ndim) if i not in stacked), "keepdims": True}


def broadcast_stacked(stacked: Any | None, like: Any) -> Any:
    """Return the axes along which layers are stacked as a tree; () for each leaf for None."""
    return jax.tree.map(lambda _: (), like) if stacked is None else stacked


def require_params(optimizer: str, params: Any) -> Updates:
    """Return `params`; raise ValueError if it is None."""
    if params is None:
        raise ValueError(
            f"`params` must be given for {optimizer}, got None; call update(grads, state, params)"
        )
    return params
