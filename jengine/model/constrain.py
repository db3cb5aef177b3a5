"""Constraints on how XLA shards intermediate results."""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

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


def set_sharding(x: jax.Array, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> jax.Array:
    """Return `x` with a sharding, in a compiled function.

    Explicit mesh axes are part of the array's type, which `jax.sharding.reshard` changes; for
    automatic ones XLA gets a constraint.
    """
    # A mesh may have axes of both types, and each call accepts only its own.
    explicit = axes_of_type(mesh, AxisType.Explicit)
    automatic = axes_of_type(mesh, AxisType.Auto)
    if explicit:
        kept = zip(spec, jax.typeof(x).sharding.spec, strict=False)
        typed = [
            old if axis is PartitionSpec.UNCONSTRAINED else _select(axis, explicit)
            for axis, old in kept
        ]
        x = jax.sharding.reshard(x, NamedSharding(mesh, PartitionSpec(*typed)))
    if automatic:
        constrained = PartitionSpec(*(_select(axis, automatic) for axis in spec))
        x = jax.lax.with_sharding_constraint(x, NamedSharding(mesh, constrained))
    return x


def axes_of_type(mesh: Mesh | AbstractMesh, kind: AxisType) -> set[str]:
    """Return the names of the mesh axes of a type."""
    return {
        str(name)
        for name, found in zip(mesh.axis_names, mesh.axis_types, strict=True)
        if found == kind
    }


def _select(axis: object, names: set[str]) -> object:
    """Return an entry in a spec with only these mesh axes."""
    if axis is PartitionSpec.UNCONSTRAINED:
        return axis
    wanted = axis if isinstance(axis, tuple) else (axis,)
    return tuple(name for name in wanted if name in names) or None
