"""What kernels must know about the mesh: its platform, and axes that divide an array."""

import math

import jax
from jax.sharding import AbstractMesh, AxisType, Mesh

from jengine.model.constrain import axes_of_type


def axes_that_divide(
    mesh: Mesh | AbstractMesh, names: tuple[str, ...], size: int
) -> tuple[str, ...]:
    """Return those axes of the mesh that XLA shards, if they divide `size`."""
    automatic = axes_of_type(mesh, AxisType.Auto)
    found = tuple(name for name in names if name in automatic)
    return found if size % math.prod(mesh.shape[name] for name in found) == 0 else ()


def get_platform() -> str:
    """Return the platform that the step is compiled for: that of the mesh, which need not be
    that of this machine.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    return jax.default_backend() if device is None else device.platform
