"""Device mesh, and the batch rows that belong to a process."""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.config.errors import ConfigError, closest
from jengine.config.plugins import load_provided
from jengine.model.constrain import axes_of_type

AXES = ("data", "fsdp", "expert", "context", "tensor")
# only in meshes that name them; elsewhere rules may name them, as of size 1
OPTIONAL_AXES = ("expert", "context")
BATCH_AXES = ("data", "fsdp", "expert")  # the default of `batch_axes`
# the total size of each axis, and `slices`: see `build_mesh`
MeshSizes = Mapping[str, int | Mapping[str, int]]


@dataclasses.dataclass(frozen=True)
class DataShard:
    """Rows in each global batch that a process supplies: those that its devices hold.

    Processes whose devices hold the same rows, for instance along `tensor`, read the same examples.
    """

    index: int = 0
    count: int = 1
    readers: tuple[int, ...] = (0,)  # the processes that read this shard, in order

    def for_axis(self, batch_axis: int | None) -> "DataShard":
        """Return the part of batches with this example axis.

        Without one (None) each process reads all of it.
        """
        return self if batch_axis is not None else dataclasses.replace(self, index=0, count=1)


def build_mesh(
    mesh: Mesh | MeshSizes | None = None,
    devices: int | Sequence[Any] | None = None,
    batch_axes: Sequence[str] | None = None,
) -> Mesh:
    """Return the mesh for a strategy.

    Args:
      mesh: a Mesh, which is used as it is; or the device count along each axis, where one may be -1
        for all remaining devices; `slices` may have the slice count along some axes, such as
        `dict(data=2)`, by the extra `plan`. None for the mesh set with `jax.set_mesh`, or all
        devices along one axis.
      devices: the devices, or how many; None for all. They replace those in a Mesh, one by one.
      batch_axes: the axes over which the batch is sharded, with any names. With None, a new mesh
        has the axes `data`, `fsdp` and `tensor`; `data` is -1 by default and the others 1. It may
        have `expert` too, which divides the batch and `MixtureOfExperts`, and `context`, which
        divides an example's tokens in `attend`.

    Raises:
      ConfigError: an unknown axis, sizes whose product is not the device count, slices that do not
        fit, or a Mesh whose axes are Manual.

    >>> dict(build_mesh({"fsdp": 1}, devices=1).shape)
    {'data': 1, 'fsdp': 1, 'tensor': 1}
    """
    if mesh is None and devices is None and not context_mesh().empty:
        mesh = context_mesh()
    if isinstance(mesh, Mesh):
        return _replace_devices(mesh, devices)
    selected = jax.devices() if devices is None or isinstance(devices, int) else list(devices)
    if isinstance(devices, int):
        if not 1 <= devices <= len(selected):
            raise ConfigError(f"devices must be at most {len(selected)}, got {devices}")
        selected = selected[:devices]
    sizes: dict[str, Any] = dict(mesh or {})
    slices = sizes.pop("slices", None)
    if batch_axes is None or not sizes:
        first, *others = batch_axes or [
            name for name in AXES if name in sizes or name not in OPTIONAL_AXES
        ]
        # The given sizes come last, so they replace the defaults but keep the order of the axes.
        sizes = {first: -1, **dict.fromkeys(others, 1), **sizes}
    else:
        choose_batch_axes(tuple(sizes), batch_axes)
    sizes = _complete_sizes(sizes, len(selected), any_names=batch_axes is not None)
    if slices is None and len(group_devices(selected, "slice_index")) == 1:
        arranged = arrange_devices(tuple(sizes.values()), selected)
    else:
        arranged = load_provided("device_orders", "arrange_slices")(sizes, slices, selected)
    # Explicit axes, the default of `jax.make_mesh`, would be part of the types of all arrays in the
    # model.
    return Mesh(arranged, tuple(sizes), axis_types=(AxisType.Auto,) * len(sizes))


def _replace_devices(mesh: Mesh, devices: int | Sequence[Any] | None) -> Mesh:
    if manual := sorted(axes_of_type(mesh, AxisType.Manual)):
        raise ConfigError(
            "mesh: the type of an axis must be Explicit or Auto, got Manual for "
            f"{', '.join(manual)}"
        )
    if isinstance(devices, int) and devices != mesh.size:
        raise ConfigError(
            f"devices must be left out or be those of the mesh, {mesh.size}, got {devices}"
        )
    if devices is None or isinstance(devices, int):
        return mesh
    # The axis types are part of the user's mesh: rules and models may depend on them.
    return Mesh(
        np.array(devices, object).reshape(mesh.devices.shape), mesh.axis_names, mesh.axis_types
    )


def _complete_sizes(sizes: Mapping[str, Any], count: int, any_names: bool) -> dict[str, int]:
    """Return the sizes with the device count instead of -1."""
    for name, size in sizes.items():
        if not any_names and name not in AXES:
            raise ConfigError(
                f"mesh: an axis must be one of {AXES}, unless `batch_axes` names those that "
                f"divide the batch, got {name!r}{closest(str(name), AXES)}"
            )
        # `True` is an int of Python, and would be an axis of size 1.
        if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
            raise ConfigError(f"mesh: {name} must be a number of devices or -1, got {size!r}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"mesh: only one axis may be -1, got {' and '.join(open_axes)}")
    if (count % fixed if open_axes else fixed != count) or fixed > count:
        raise ConfigError(
            f"`parallel.mesh`: the product of the sizes must {'divide' if open_axes else 'be'} "
            f"the number of devices, {count}, got {fixed} for {dict(sizes)}; an axis of -1 takes "
            "all that are left, and `parallel.devices` sets how many are used"
        )
    return {name: count // fixed if size == -1 else size for name, size in sizes.items()}


def arrange_devices(sizes: Sequence[int], devices: Sequence[jax.Device]) -> np.ndarray:
    """Return the devices of a slice in mesh shape, such that neighbours are close.

    Physical axes of a TPU slice are split where necessary, for instance 4 x 4 x 4 chips for an 8 x
    8 mesh.

    Raises:
      ConfigError: chips with a hole between them.
    """
    try:
        return mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except AssertionError as error:
        raise ConfigError(
            "devices must be all chips of a slice, or a part of it without holes, got "
            f"{len(devices)}"
        ) from error


def group_devices(devices: Sequence[jax.Device], name: str) -> collections.Counter[int]:
    """Return the device count by slice or process; devices in a single slice may have no index."""
    return collections.Counter(getattr(device, name, 0) for device in devices)


# --- Questions about a mesh ---


def context_mesh() -> Mesh:
    """Return the mesh set with `jax.set_mesh`, which is empty without one."""
    mesh = jax.sharding.get_mesh()
    assert isinstance(mesh, Mesh)
    return mesh


def choose_batch_axes(
    names: Sequence[str], batch_axes: Sequence[str] | None = None
) -> tuple[str, ...]:
    """Return the axes over which the batch is sharded: those given, or those in `names` of
    BATCH_AXES.

    Raises:
      ConfigError: axes that the mesh does not have, or no axis.
    """
    names = tuple(names)
    if batch_axes is None:
        # fsdp divides the batch too: sharded parameters with a whole batch on each device would
        # multiply the work.
        if found := tuple(name for name in BATCH_AXES if name in names):
            return found
        raise ConfigError(
            "the mesh must have the axis 'data' or 'fsdp', or `batch_axes` must name the axes "
            f"that divide the batch, got the axes {names}; for instance batch_axes=({names[0]!r},)"
        )
    if not batch_axes or len(set(batch_axes) & set(names)) < len(batch_axes):
        raise ConfigError(
            f"batch_axes must be one or several different axes of the mesh {names}, got "
            f"{tuple(batch_axes)}"
        )
    return tuple(batch_axes)


def find_data_shard(
    mesh: Mesh,
    process: int,
    batch_axes: Sequence[str] | None = None,
    process_of: Mapping[Any, int] | None = None,
) -> DataShard:
    """Return the rows that a process must supply.

    `process_of` has the process index by device, by default JAX's.

    Raises:
      ConfigError: the process has no device in the mesh, or the rows of two processes overlap in
        part.
    """
    axes = choose_batch_axes(mesh.axis_names, batch_axes)
    parts = math.prod(mesh.shape[name] for name in axes)
    sharding = NamedSharding(mesh, PartitionSpec(axes))
    parts_by_process: dict[int, set[int]] = collections.defaultdict(set)
    device: Any
    # A vector with one element per part tells which part each device holds.
    for device, (index,) in sharding.devices_indices_map((parts,)).items():
        owner = device.process_index if process_of is None else process_of[device]
        parts_by_process[owner].add(index.start or 0)
    if process not in parts_by_process:
        raise ConfigError(
            f"the mesh must have devices of every process, got none of process {process}"
        )
    # Sorted, so that every process numbers the shards alike without talking to the others.
    shards = sorted({tuple(sorted(held)) for held in parts_by_process.values()})
    # Each part belongs to one shard: then a process can read its own rows without knowing those of
    # the others.
    if len(shards[0]) * len(shards) != parts or len(set().union(*shards)) != parts:
        raise ConfigError(
            f"the mesh {dict(mesh.shape)} must give any two processes the same parts of a batch "
            "or none in common, got "
            f"{shards}; change the sizes of the axes, or the order of the devices"
        )
    own = tuple(sorted(parts_by_process[process]))
    readers = sorted(other for other, held in parts_by_process.items() if held == set(own))
    return DataShard(shards.index(own), len(shards), tuple(readers))
