"""Build the mesh of devices, and check that a batch can be divided over it."""

import collections
import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.errors import ConfigError, closest
from jengine.sharding.slices import arrange_devices

logger = logging.getLogger("jengine")

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")
MeshSizes = Mapping[str, int | Mapping[str, int]]  # the total size of each axis, and `slices`: see `build_mesh`


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Identify the rows of each global batch that a process supplies: those that its devices hold.

    Processes whose devices hold the same rows, for instance along `tensor`, read the same examples.
    """

    index: int = 0
    count: int = 1
    readers: tuple[int, ...] = (0,)  # the processes that read this shard, in order


def build_mesh(mesh: Mesh | MeshSizes | None = None, devices: int | Sequence[Any] | None = None) -> Mesh:
    """Return a mesh with the axes `data`, `fsdp` and `tensor`.

    Args:
      mesh: number of devices along each axis, by default 1 (`data`: -1); one axis may be -1 for all remaining devices.
        `slices` may have the number of slices along some axes, such as `dict(data=2)`; see `arrange_devices`.
        Or a Mesh, whose explicit axes become automatic.
      devices: the devices, or their number; None for all.

    Raises:
      ConfigError: an unknown axis, a product of the sizes that is not the number of devices, or slices that do not fit.
    """
    if isinstance(mesh, Mesh):
        if not set(BATCH_AXES) & set(mesh.axis_names):
            raise ConfigError(f"mesh must have the axis 'data' or 'fsdp' for the batch, got {mesh.axis_names}")
        # With explicit axes, JAX does not allow reshaping or indexing of a sharded batch; models do both.
        if explicit := [n for n, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind != AxisType.Auto]:
            logger.warning(
                f"The mesh axes {', '.join(explicit)} are used as automatic ones: explicit axes, the default of "
                "jax.make_mesh, are not supported; axis_types=(AxisType.Auto,) * n leaves this line out."
            )
        return Mesh(mesh.devices, mesh.axis_names)
    selected = choose_devices(devices)
    sizes: dict[str, Any] = {"data": -1, "fsdp": 1, "tensor": 1, **dict(mesh or {})}
    slices = sizes.pop("slices", None)
    for name, size in sizes.items():
        if name not in AXES:
            raise ConfigError(f"mesh: an axis must be one of {AXES}, got {name!r}{closest(str(name), AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
            raise ConfigError(f"mesh: {name} must be a number of devices or -1, got {size!r}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"mesh: only one axis may be -1, got {' and '.join(open_axes)}")
    if (len(selected) % fixed if open_axes else fixed != len(selected)) or fixed > len(selected):
        raise ConfigError(
            f"mesh: the product of the sizes must {'divide' if open_axes else 'be'} the number of devices, "
            f"{len(selected)}, got {fixed} for {dict(sizes)}; change the mesh, or set `devices`"
        )
    sizes = {name: len(selected) // fixed if size == -1 else size for name, size in sizes.items()}
    arranged = arrange_devices(sizes, slices, selected)
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def choose_devices(devices: int | Sequence[Any] | None) -> Sequence[Any]:
    """Return the given devices, the first `devices` of all, or all for None.

    Raises:
      ConfigError: more devices than there are.
    """
    all_devices = jax.devices()
    if devices is None:
        return all_devices
    if not isinstance(devices, int):
        return list(devices)
    if not 1 <= devices <= len(all_devices):
        raise ConfigError(f"devices must be at most {len(all_devices)}, got {devices}")
    return all_devices[:devices]


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which the batch is sharded."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def batch_parts(mesh: Mesh) -> int:
    """Return the number of shards of the batch."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def find_data_shard(mesh: Mesh, process: int) -> DataShard:
    """Return the rows that a process must supply, from the sharding of the batch.

    Args:
      mesh: the mesh of all processes.
      process: index of the process.

    Raises:
      ConfigError: the process has no device in the mesh, or the rows of two processes overlap in part.
    """
    parts = batch_parts(mesh)
    sharding = NamedSharding(mesh, PartitionSpec(batch_axes(mesh)))
    parts_by_process: dict[int, set[int]] = collections.defaultdict(set)
    device: Any
    for device, (index,) in sharding.devices_indices_map((parts,)).items():
        parts_by_process[device.process_index].add(index.start or 0)
    if process not in parts_by_process:
        raise ConfigError(f"the mesh must have devices of every process, got none of process {process}")
    shards = sorted({tuple(sorted(held)) for held in parts_by_process.values()})
    if len(shards[0]) * len(shards) != parts or len(set().union(*shards)) != parts:
        raise ConfigError(
            f"the mesh {dict(mesh.shape)} must give any two processes the same parts of a batch or none in common, got "
            f"{shards}; change the sizes of the axes, or the order of the devices"
        )
    own = tuple(sorted(parts_by_process[process]))
    readers = sorted(other for other, held in parts_by_process.items() if held == set(own))
    return DataShard(shards.index(own), len(shards), tuple(readers))


def check_batch(batch: Any, parts: int) -> None:
    """Check that every array of a batch can be divided into equal parts along its first axis.

    Args:
      batch: pytree of arrays with a leading batch axis; the share of this process.
      parts: number of parts of that share.

    Raises:
      ValueError: an array that cannot be divided.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        shape = np.shape(leaf)
        if not shape or shape[0] % parts:
            actual = f"the shape {tuple(shape)}" if shape else "no batch axis"
            raise ValueError(
                f"the batch must be divisible over {parts} devices, got {actual} for its entry "
                f"{jax.tree_util.keystr(path)}; set batch_size to a multiple of {parts}; the last batch is padded, or "
                "dropped with drop_last=True"
            )
