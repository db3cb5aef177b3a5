"""Constrain how XLA shards the intermediate results of a model."""

import math

import jax
from jax.sharding import AxisType, PartitionSpec


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Return `x` with its leading axes sharded over axes of the mesh, in a step of `Pjit` or `DataParallel`.

    Axes of the mesh over which the step is mapped, and those that do not divide the axis of `x`, are left out. Without
    a mesh, on a single device for instance, `x` is returned as it is.

    Args:
      x: an intermediate result, of any shape.
      *axes: for each axis of `x`, an axis of the mesh ('data', 'fsdp', 'tensor'), several of them, or None for no
        sharding; no sharding for further axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    automatic = {name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto}
    if not automatic:
        return x
    spec = []
    for size, axis in zip(x.shape, axes, strict=False):
        names = tuple(name for name in ((axis,) if isinstance(axis, str) else axis or ()) if name in automatic)
        spec.append(names if size % math.prod(mesh.shape[name] for name in names) == 0 else None)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*spec))
