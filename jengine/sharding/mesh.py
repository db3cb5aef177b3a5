"""Build the mesh: the devices that take part, and the purpose of each axis."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh

from jengine.errors import ConfigError, closest

AXES = ("data", "fsdp", "tensor")
BATCH_AXES = ("data", "fsdp")


def build_mesh(mesh: Mesh | Mapping[str, int] | None = None, devices: int | Sequence[Any] | None = None) -> Mesh:
    """Return a mesh with the axes `data`, `fsdp` and `tensor`.

    Args:
      mesh: devices along each axis, default 1 (`data`: -1); -1, once, takes the remaining ones. Or a Mesh,
        with axes of any type: explicit ones become automatic.
      devices: the devices, or their number; None takes all.

    Raises:
      ConfigError: an unknown axis, or sizes whose product is not the number of devices.
    """
    if isinstance(mesh, Mesh):
        if not set(BATCH_AXES) & set(mesh.axis_names):
            raise ConfigError(f"mesh must have 'data' or 'fsdp' for the batch, got the axes {mesh.axis_names}")
        # Under explicit axes, reshaping or indexing a divided batch is an error of JAX; models do both.
        return Mesh(mesh.devices, mesh.axis_names)
    chosen = choose_devices(devices)
    sizes = {"data": -1, "fsdp": 1, "tensor": 1, **dict(mesh or {})}
    for name, size in sizes.items():
        if name not in AXES:
            raise ConfigError(f"mesh: an axis must be known, got {name!r}{closest(str(name), AXES)}")
        if isinstance(size, bool) or not isinstance(size, int) or size == 0 or size < -1:
            raise ConfigError(f"mesh: {name} must be a number of devices or -1, got {size!r}")
    fixed = math.prod(size for size in sizes.values() if size != -1)
    open_axes = [name for name, size in sizes.items() if size == -1]
    if len(open_axes) > 1:
        raise ConfigError(f"mesh: only one axis may be -1, got {' and '.join(open_axes)}")
    if (len(chosen) % fixed if open_axes else fixed != len(chosen)) or fixed > len(chosen):
        raise ConfigError(
            f"mesh: {dict(sizes)} does not fit {len(chosen)} devices: the axes other than -1 make up {fixed}; "
            "change the mesh, or set `devices`"
        )
    shape = tuple(len(chosen) // fixed if size == -1 else size for size in sizes.values())
    return jax.make_mesh(shape, tuple(sizes), axis_types=(AxisType.Auto,) * len(shape), devices=chosen)


def choose_devices(devices: int | Sequence[Any] | None) -> Sequence[Any]:
    """Return the devices themselves, or the first so many of all; all for None.

    Raises:
      ConfigError: there are fewer.
    """
    everything = jax.devices()
    if devices is None:
        return everything
    if not isinstance(devices, int):
        return list(devices)
    if not 1 <= devices <= len(everything):
        raise ConfigError(f"devices must be at most {len(everything)}, got {devices}")
    return everything[:devices]


def batch_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the axes over which the batch is divided."""
    return tuple(name for name in BATCH_AXES if name in mesh.axis_names)


def batch_parts(mesh: Mesh) -> int:
    """Return the number of parts into which the batch is divided."""
    return math.prod(mesh.shape[name] for name in batch_axes(mesh))


def check_batch(batch: Any, parts: int) -> None:
    """Check that every array of a batch can be divided into equal parts along its first axis.

    Args:
      batch: pytree of arrays with a leading batch axis; this process's share of it.
      parts: number of parts of this process's share.

    Raises:
      ValueError: it cannot.
    """
    for path, leaf in jax.tree_util.tree_flatten_with_path(batch)[0]:
        shape = getattr(leaf, "shape", ())
        if not shape or shape[0] % parts:
            found = f"the shape {tuple(shape)}" if shape else "no batch axis"
            raise ValueError(
                f"the batch is divided over {parts} devices, but its entry {jax.tree_util.keystr(path)} has {found}: "
                f"set batch_size to a multiple of {parts}; the last batch is padded, or omitted with "
                "drop_last=True"
            )
