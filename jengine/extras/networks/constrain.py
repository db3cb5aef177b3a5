"""Constraints on how XLA shards intermediate results."""

import math

import jax
from jax.sharding import AxisType, PartitionSpec

from jengine.model.constrain import axes_of_type, set_sharding

BATCH = ("data", "fsdp", "expert")  # axes of the mesh over which examples are sharded
# axis of the mesh over which the tokens of an example are sharded; most meshes do not have it
CONTEXT = "context"


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Return `x` with the leading axes sharded over mesh axes, in a step under `Pjit` or
    `DataParallel`.

    Mesh axes over which the step is mapped, and those that do not divide the axis in `x`, are left
    out. Where the mesh has none of the given axes, that axis keeps the sharding; without `context`
    it is not sharded. Without a mesh, such as on a single device, `x` is returned as it is.

    >>> constrain(jax.numpy.ones((4, 2)), ("data", "fsdp")).shape
    (4, 2)

    Args:
      x: an intermediate result, of any shape.
      *axes: for each axis in `x`, a mesh axis ('data', 'fsdp', 'tensor'), several of them, or None
        for no sharding; no sharding for further axes.
    """
    # Asked while tracing: the same model runs alone, under Pjit, and inside of `shard_map`, where
    # some axes are not free.
    mesh = jax.sharding.get_abstract_mesh()
    usable = axes_of_type(mesh, AxisType.Auto) | axes_of_type(mesh, AxisType.Explicit)
    if not usable:
        return x
    spec: list[object] = []
    for size, axis in zip(x.shape, axes, strict=False):
        wanted = (axis,) if isinstance(axis, str) else axis or ()
        names = tuple(name for name in wanted if name in usable)
        if wanted and wanted != (CONTEXT,) and not set(wanted) & set(mesh.axis_names):
            # None of the axes exists here, so that XLA decides; None in the spec would replicate
            # the array.
            spec.append(PartitionSpec.UNCONSTRAINED)
        else:
            spec.append(
                names if size % math.prod(mesh.shape[name] for name in names) == 0 else None
            )
    return set_sharding(x, mesh, PartitionSpec(*spec))
