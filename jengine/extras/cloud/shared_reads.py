"""Reads of arrays that several processes need: one of them reads each byte, and the network carries
it to the others.

Without this each process would read its own copy of a replicated array. Reading a slice on each
would not help: an array is stored as a grid of chunks, and whoever reads a part of a chunk fetches
all of it.
"""

import collections
import functools
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from jengine.checkpoint.orbax import read_metadata, read_own
from jengine.config.paths import flatten

_BATCH = 2**28  # bytes on each device that one program sends; they are there twice until it is done
_REGION = 2**30  # bytes that a device may need for larger regions than its own
# bytes; Orbax reads up to 1 MB between two wanted arrays of a file as well, to save requests
_SMALL = 2**20
_COPY = "copy"  # name of the mesh axis along which all devices need the same

Structs = Mapping[str, jax.ShapeDtypeStruct]


class SharedRead(NamedTuple):
    """How the processes read an array together.

    Attributes:
      struct: shape, dtype and sharding of the array.
      copies: axes of the mesh along which the array is not divided while it is read.
      source: sharding along the others, over one device for each region, whose processes read them.
    """

    struct: jax.ShapeDtypeStruct
    copies: tuple[str, ...]
    source: NamedSharding


def read_shared(directory: pathlib.PurePath, structs: Structs) -> dict[str, Any]:
    """Read arrays into a flat dict by dotted path, each byte by one process; all call this."""
    stored = {path: struct for path, struct in structs.items() if struct.size}
    plans = plan_reads(stored, _read_chunk_shapes(directory))
    own = {path: struct for path, struct in structs.items() if path not in plans}
    for path, plan in plans.items():
        if plan.source.addressable_devices:
            own[path] = jax.ShapeDtypeStruct(
                plan.struct.shape, plan.struct.dtype, sharding=plan.source
            )
    arrays = read_own(directory, own)
    return arrays | share(plans, arrays.pop)


def _read_chunk_shapes(directory: pathlib.PurePath) -> dict[str, Sequence[int] | None]:
    """Return the shape of the chunks in which each array is stored, None where it is not known."""
    storage = {
        path: getattr(leaf, "storage", None)
        for path, leaf in flatten(read_metadata(directory)).items()
    }
    return {path: found and found.chunk_shape for path, found in storage.items()}


def plan_reads(
    structs: Structs, chunks: Mapping[str, Sequence[int] | None]
) -> dict[str, SharedRead]:
    """Choose a reader for each array that several processes would otherwise read.

    All processes call this with the same arguments, and come to the same result.

    Args:
      structs: the arrays to read.
      chunks: the stored chunk shape of each; None if it is not known.
    """
    plans: dict[str, SharedRead] = {}
    loads: collections.Counter[int] = collections.Counter()  # bytes to read by process
    for name, struct in structs.items():
        sharding = struct.sharding
        if not isinstance(sharding, NamedSharding) or sharding.is_fully_addressable:
            continue
        divided = _divide(struct, sharding, chunks.get(name))
        used = {axis for axes in divided for axis in axes}
        copies = tuple(axis for axis in sharding.mesh.axis_names if axis not in used)
        readers = _list_readers(sharding.mesh, copies)
        if len(readers) == 1:  # no process needs what another reads
            continue
        size = struct.size * struct.dtype.itemsize
        if size < _SMALL:  # so what is read between two of them is wanted too
            processes = min(readers, key=sorted)
        else:
            processes = min(
                readers, key=lambda processes: max(loads[process] for process in processes)
            )
        loads.update(dict.fromkeys(processes, size // len(processes)))
        devices = readers[processes]
        names = (_COPY, *(axis for axis in sharding.mesh.axis_names if axis in used))
        mesh = Mesh(
            devices[len(plans) % len(devices)], names, axis_types=(AxisType.Auto,) * len(names)
        )
        plans[name] = SharedRead(struct, copies, NamedSharding(mesh, PartitionSpec(*divided)))
    return plans


def _divide(
    struct: jax.ShapeDtypeStruct, sharding: NamedSharding, chunk: Sequence[int] | None
) -> list[tuple[str, ...]]:
    """Return the mesh axes that divide each axis of an array while it is read, so that none
    divides a chunk.
    """
    entries = [*sharding.spec, *[None] * (len(struct.shape) - len(sharding.spec))]
    # Read in pieces that are whole chunks of the file: two processes with halves of a chunk would
    # both read all of it.
    wanted = [_list_axes(entry) for entry in entries]
    if chunk is None or len(chunk) != len(wanted):
        return wanted
    sizes = sharding.mesh.shape
    divided = []
    for axes, length, step in zip(wanted, struct.shape, chunk, strict=True):
        fitting = (
            n
            for n in range(len(axes), 0, -1)
            if length // math.prod(sizes[axis] for axis in axes[:n]) % step == 0
        )
        divided.append(axes[: next(fitting, 0)])
    parts = math.prod(sizes[axis] for axes in divided for axis in axes)
    is_too_large = divided != wanted and struct.size * struct.dtype.itemsize // parts > _REGION
    return wanted if is_too_large else divided


def _list_axes(entry: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """Return the mesh axes in an entry of a PartitionSpec."""
    return () if entry is None else (entry,) if isinstance(entry, str) else tuple(entry)


@functools.lru_cache
def _list_readers(mesh: Mesh, copies: tuple[str, ...]) -> dict[frozenset[int], list[np.ndarray]]:
    """Return the sets of processes that hold an array once, each with its choices of devices,
    one for each region.
    """
    axes = [mesh.axis_names.index(axis) for axis in copies]
    devices = np.moveaxis(mesh.devices, axes, range(len(axes)))
    devices = devices.reshape(-1, *devices.shape[len(axes) :])
    processes = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
    readers: dict[frozenset[int], list[np.ndarray]] = {}
    for index in range(len(devices)):
        # Copies that the same processes hold are alternatives, between which `plan_reads` takes
        # turns.
        readers.setdefault(frozenset(processes[index].flat), []).append(devices[index : index + 1])
    return readers


def share(plans: Mapping[str, SharedRead], take: Callable[[str], Any]) -> dict[str, jax.Array]:
    """Send what each process has read to all devices that need it, bit for bit.

    All processes call this together.

    Args:
      plans: how the arrays were read.
      take: returns an array with the sharding `source` of its plan, without keeping it; only called
        on processes that have some of its devices.
    """
    shared: dict[str, jax.Array] = {}
    batch: dict[str, jax.Array] = {}
    size = 0
    for name, plan in plans.items():
        batch[name] = _lay_out(plan, take(name) if plan.source.addressable_devices else None)
        size += (
            math.prod(batch[name].sharding.shard_shape(batch[name].shape))
            * batch[name].dtype.itemsize
        )
        # In batches: a program for each array would take long to compile, one for all would hold
        # everything twice.
        if size > _BATCH or len(shared) + len(batch) == len(plans):
            targets = {name: plans[name].struct for name in batch}
            shared |= _send(batch, targets)
            batch = {}
            size = 0
    return shared


def _lay_out(plan: SharedRead, read: jax.Array | None) -> jax.Array:
    """Return all copies of an array one below the other, one with its values and the others with
    zeros.
    """
    struct = plan.struct
    sharding = plan.struct.sharding
    own = {} if read is None else {shard.device: shard.data for shard in read.addressable_shards}
    first, *others = plan.source.spec or (None,)
    spec = PartitionSpec((*plan.copies, *_list_axes(first)), *others)
    count = math.prod(sharding.mesh.shape[axis] for axis in plan.copies)
    length, *rest = struct.shape or (1,)
    wide = jax.ShapeDtypeStruct(
        (count * length, *rest), struct.dtype, sharding=NamedSharding(sharding.mesh, spec)
    )
    shape = wide.sharding.shard_shape(wide.shape)
    parts = [
        # Zeros on the devices that have read nothing: adding up over the copies then gives each
        # what one has read.
        own[device].reshape(shape)
        if device in own
        else jax.device_put(np.zeros(shape, struct.dtype), device)
        for device in sharding.mesh.local_devices
    ]
    return jax.make_array_from_single_device_arrays(wide.shape, wide.sharding, parts)


def _send(wide: Mapping[str, jax.Array], structs: Structs) -> dict[str, jax.Array]:
    def add_up(arrays: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        return {
            name: _add_bits(array.reshape(-1, *structs[name].shape)).astype(structs[name].dtype)
            for name, array in arrays.items()
        }

    shardings = {name: struct.sharding for name, struct in structs.items()}
    # The output sharding makes XLA send: no collective is written by hand, and any mesh works.
    sent: dict[str, jax.Array] = jax.jit(add_up, out_shardings=shardings)(dict(wide))
    return sent


def _add_bits(copies: jax.Array) -> jax.Array:
    """Return the sum over the first axis, where all copies but one are zero."""
    dtype = copies.dtype
    if jnp.issubdtype(dtype, jnp.complexfloating):
        return jax.lax.complex(_add_bits(copies.real), _add_bits(copies.imag))
    if not jnp.issubdtype(dtype, jnp.floating):
        return copies.sum(axis=0)
    # As integers: a sum of floats turns -0.0 into 0.0 and may change the bits of a NaN.
    bits = jax.lax.bitcast_convert_type(copies, f"uint{jnp.finfo(dtype).bits}")
    return jax.lax.bitcast_convert_type(bits.sum(axis=0).astype(bits.dtype), dtype)
