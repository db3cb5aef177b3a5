"""Optimizer state in the memory of the host."""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding

from jengine import paths
from jengine.model.model import ArrayTree
from jengine.model.remat import HOST_MEMORY

PyTree = Any


def offload_optimizer_state(tree: ArrayTree, shardings: PyTree, under: str = "") -> PyTree:
    """Return the shardings for a training state, or a part of it, with the arrays of the optimizer on the host.

    Scalars, such as the number of updates, stay on the device.
    """

    def move(path: str, leaf: Any, sharding: NamedSharding) -> NamedSharding:
        is_moved = f"{under}{path}".startswith("opt_state.") and leaf.ndim > 0
        return sharding.with_memory_kind(HOST_MEMORY) if is_moved else sharding

    return paths.map_with_path(move, tree, shardings)


def compute_on_device(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a training step that copies the optimizer state to the device; its output shardings copy it back."""

    @functools.wraps(step)
    def run(state: Any, *inputs: Any) -> Any:
        copied = jax.device_put(state.opt_state, jax.memory.Space.Device)
        new_state, outputs = step(state.replace(opt_state=copied), *inputs)
        # What only passes through, such as moments while gradients are accumulated, is not copied at all.
        opt_state = jax.tree.map(
            lambda old, copy, new: old if new is copy else new, state.opt_state, copied, new_state.opt_state
        )
        return new_state.replace(opt_state=opt_state), outputs

    return run
