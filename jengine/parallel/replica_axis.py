"""Replica axis, the leading axis of some leaves: conversion to other numbers of replicas, and
gathering of examples.
"""

import contextlib
import contextvars
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np

from jengine.config import paths
from jengine.model.model import FROZEN, ArrayTree

PyTree = Any

AXIS = "data"  # the mapped axis of a step of `DataParallel`, by default
# A context variable: losses call `gather_replicas`, and know neither the strategy nor the axis.
_axis = contextvars.ContextVar("axis", default=AXIS)  # in the step that is traced


@contextlib.contextmanager
def replicas_along(axis: str) -> Iterator[None]:
    """Set the mapped axis for `gather_replicas` while a step is traced."""
    token = _axis.set(axis)
    try:
        yield
    finally:
        _axis.reset(token)


def is_per_replica(path: str) -> bool:
    """Return whether the training state's leaf at this dotted path has a leading replica axis.

    >>> is_per_replica("model_state.bn.mean"), is_per_replica("params.fc.kernel")
    (True, False)
    """
    item, *rest = path.split(".")
    if item == "hook_state":  # hook_state.<hook>.model_state, such as averaged statistics
        item = ".".join(rest[1:2])
        rest = rest[2:]
    # frozen parameters never change, so a copy per replica would only take memory and space in
    # checkpoints
    return (item == "model_state" and rest[:1] != [FROZEN]) or _is_share(path)


def _is_share(path: str) -> bool:
    """Return whether the replicas hold parts of a sum, as in an unfinished accumulation window."""
    item, *rest = path.split(".")
    return item == "opt_state" and rest[1:2] in (["accumulated_grads"], ["weight_sum"])


def map_per_replica(fn: Callable[[Any], Any], state: ArrayTree) -> PyTree:
    """Apply `fn` to the per-replica leaves of `state`, a training state or a dict with the same
    items.
    """
    return paths.map_with_path(lambda path, leaf: fn(leaf) if is_per_replica(path) else leaf, state)


def convert_replica_axis(state: ArrayTree, before: int | None, after: int | None) -> PyTree:
    """Convert a state to another number of replicas.

    Statistics are averaged, integers are taken from the first replica, and every new replica gets a
    copy. Accumulated gradients and weights are summed, and every new replica gets an equal part of
    the sum.

    Args:
      state: a training state, or a dict with the same items.
      before, after: the old and the new number of replicas; None without a replica axis.

    Returns:
      `state` itself if both are equal; otherwise with NumPy arrays for the per-replica leaves.

    >>> convert_replica_axis(
    ...     {"model_state": {"mean": np.array([[1.0], [3.0]])}}, before=2, after=None
    ... )
    {'model_state': {'mean': array([2.])}}
    """
    if before == after:
        return state

    def convert(path: str, leaf: Any) -> Any:
        if not is_per_replica(path):
            return leaf
        # NumPy has no keys, only the numbers in them
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return jax.random.wrap_key_data(
                convert(path, jax.random.key_data(leaf)), impl=jax.random.key_impl(leaf)
            )
        value = np.asarray(leaf)
        if before is not None:
            # Shares are summed: the update divides by the sum of the weights over all replicas.
            if _is_share(path):
                value = np.asarray(value.sum(axis=0))  # each replica holds a share
            # In float32, as a sum of bfloat16 numbers would round. JAX's `issubdtype` knows
            # bfloat16; NumPy's does not.
            elif jax.numpy.issubdtype(value.dtype, np.floating):
                value = np.asarray(value.mean(axis=0, dtype=np.float32)).astype(value.dtype)
            else:
                value = np.asarray(value[0])  # a mean of counters would not be one
        if after is None:
            return value
        return np.broadcast_to(
            value / np.float32(after) if _is_share(path) else value, (after, *value.shape)
        )

    return paths.map_with_path(convert, state)


def convert_replica_axis_structs(state: ArrayTree, before: int | None, after: int | None) -> PyTree:
    """Return `state` with ShapeDtypeStructs for the leaves that `convert_replica_axis` converts.

    The arrays may be on other processes' devices, which `convert_replica_axis` cannot read.
    """
    if before == after:
        return state

    def convert(leaf: Any) -> jax.ShapeDtypeStruct:
        # Shapes alone, so that a checkpoint can be checked and read for another number of replicas.
        shape = leaf.shape if before is None else leaf.shape[1:]
        return jax.ShapeDtypeStruct(shape if after is None else (after, *shape), leaf.dtype)

    return map_per_replica(convert, state)


def gather_replicas(rows: jax.Array) -> jax.Array:
    """Return the rows of all replicas, real[B * replicas, ...], in batch order.

    In a `DataParallel` step this is an exchange between the replicas, which all of them must reach.
    Elsewhere `rows`, real[B, ...], already belong to the whole batch, and are returned.

    >>> gather_replicas(jax.numpy.ones((2, 3))).shape
    (2, 3)
    """
    try:
        # `tiled` joins the replicas' rows along the batch axis instead of adding a replica axis.
        return jax.lax.all_gather(rows, _axis.get(), tiled=True)
    except NameError:  # JAX's error for an axis that is not mapped
        return rows


def select_replica(rows: jax.Array, count: int) -> jax.Array:
    """Return this replica's part, real[count, ...], of the rows that `gather_replicas` returned."""
    try:
        return jax.lax.dynamic_slice_in_dim(rows, jax.lax.axis_index(_axis.get()) * count, count)
    except NameError:
        return rows
