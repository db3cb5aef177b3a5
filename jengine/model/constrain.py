"""Sharding of an array inside a compiled function."""

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec


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
