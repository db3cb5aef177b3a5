"""Constrain how XLA shards the intermediate results of a model."""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


def constrain(x: jax.Array, *axes: str | tuple[str, ...] | None) -> jax.Array:
    """Return `x` with its leading axes sharded over axes of the mesh, in a step of `Pjit` or `DataParallel`.

    Axes of the mesh over which the step is mapped, and those that do not divide the axis of `x`, are left out. Where
    the mesh has none of the given axes, the sharding of that axis of `x` is kept. Without a mesh, on a single device
    for instance, `x` is returned as it is.

    Args:
      x: an intermediate result, of any shape.
      *axes: for each axis of `x`, an axis of the mesh ('data', 'fsdp', 'tensor'), several of them, or None for no
        sharding; no sharding for further axes.
    """
    mesh = jax.sharding.get_abstract_mesh()
    usable = _axes_of_type(mesh, AxisType.Auto) | _axes_of_type(mesh, AxisType.Explicit)
    if not usable:
        return x
    spec: list[object] = []
    for size, axis in zip(x.shape, axes, strict=False):
        wanted = (axis,) if isinstance(axis, str) else axis or ()
        names = tuple(name for name in wanted if name in usable)
        if wanted and not set(wanted) & set(mesh.axis_names):
            spec.append(PartitionSpec.UNCONSTRAINED)
        else:
            spec.append(names if size % math.prod(mesh.shape[name] for name in names) == 0 else None)
    return set_sharding(x, mesh, PartitionSpec(*spec))


def set_sharding(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Return `x` with a sharding, in a compiled function.

    Explicit mesh axes are part of the array's type, which `jax.sharding.reshard` changes; for automatic ones XLA gets a
    constraint.
    """
    explicit, automatic = _axes_of_type(mesh, AxisType.Explicit), _axes_of_type(mesh, AxisType.Auto)
    if explicit:
        kept = zip(spec, jax.typeof(x).sharding.spec, strict=False)
        typed = [old if axis is PartitionSpec.UNCONSTRAINED else _select(axis, explicit) for axis, old in kept]
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*typed)))
    if automatic:
        constrained = PartitionSpec(*(_select(axis, automatic) for axis in spec))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, constrained))
    return x


def _axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> set[str]:
    return {str(name) for name, found in zip(mesh.axis_names, mesh.axis_types, strict=True) if found == kind}


def _select(axis: object, names: set[str]) -> object:
    """Return an entry of a spec with only these axes of the mesh."""
    if axis is PartitionSpec.UNCONSTRAINED:
        return axis
    wanted = axis if isinstance(axis, tuple) else (axis,)
    return tuple(name for name in wanted if name in names) or None
