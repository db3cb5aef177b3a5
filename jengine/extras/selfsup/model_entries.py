"""Model attributes and state entries that hooks require: finding and replacing them."""

import os
from typing import Any, TypeGuard, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config import paths
from jengine.config.errors import ArgumentError, closest
from jengine.extras.selfsup.memory_bank import MemoryBank
from jengine.model.model import ModelState
from jengine.parallel.processes import put_whole
from jengine.parallel.strategy import Strategy

T = TypeVar("T")


def find_state_entry(model_state: ModelState, name: str, hook_name: str) -> Any:
    """Return the only array called `name`, at any depth in the model's state.

    Messages name the hook.
    """
    leaves = paths.flatten(model_state)
    matches = [leaf for path, leaf in leaves.items() if path.split(".")[-1] == name]
    if len(matches) != 1:
        raise ArgumentError(
            f"{hook_name}: the model state (the second result of `init`) must have one entry "
            f"{name!r}, got {len(matches) or 'none'}{'' if matches else closest(name, leaves)}"
        )
    return matches[0]


def replace_state_entry(
    model_state: ModelState, name: str, value: jax.Array, hook_name: str
) -> ModelState:
    """Return the model's state with another array called `name`, sharded as the old one.

    See `find_state_entry`.
    """
    new = device_put_like(value, find_state_entry(model_state, name, hook_name))
    return paths.map_with_path(
        lambda path, leaf: new if path.split(".")[-1] == name else leaf, model_state
    )


def find_memory_bank(model_state: ModelState, hook_name: str) -> MemoryBank:
    """Return the only memory bank, at any depth in the model's state; messages name the hook."""
    banks = [leaf for leaf in jax.tree.leaves(model_state, is_leaf=_is_bank) if _is_bank(leaf)]
    if len(banks) != 1:
        raise ArgumentError(
            f"{hook_name}: the model state must have one MemoryBank, got {len(banks) or 'none'}; "
            "create it with `empty_bank` in the model's `init`"
        )
    return banks[0]


def replace_memory_bank(model_state: ModelState, bank: MemoryBank, hook_name: str) -> ModelState:
    """Return the model's state with another memory bank, sharded as the old one.

    See `find_memory_bank`.
    """
    new = device_put_like(bank, find_memory_bank(model_state, hook_name))
    return jax.tree.map(lambda leaf: new if _is_bank(leaf) else leaf, model_state, is_leaf=_is_bank)


def device_put_like(new: T, old: T) -> T:
    """Put the arrays in `new` on devices with the shardings in `old`; all replicas get them."""
    return jax.tree.map(
        lambda x, like: put_whole(jnp.broadcast_to(x, like.shape), like.sharding), new, old
    )


def drop_replica_axis(tree: T, strategy: Strategy) -> T:
    """Return the first replica's entries in the model's state.

    `tree` itself without a replica axis.
    """
    return tree if strategy.replicas is None else jax.tree.map(lambda x: x[0], tree)


def save_array(path: str, array: np.ndarray) -> None:
    """Write an array to a file atomically."""
    np.save(f"{path}.tmp.npy", array)
    os.replace(f"{path}.tmp.npy", path)


def _is_bank(node: object) -> TypeGuard[MemoryBank]:
    return isinstance(node, MemoryBank)
