"""Device order in a mesh over one slice, or over several with a slower network between them."""

import collections
import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from jengine.errors import ConfigError, closest

logger = logging.getLogger("jengine")


def arrange_devices(
    sizes: Mapping[str, int], slices: Mapping[str, int] | None, devices: Sequence[jax.Device]
) -> np.ndarray:
    """Return a device array in the shape of a mesh, in which neighbours are close.

    Physical axes of a TPU slice are split where necessary, for instance 4 x 4 x 4 chips for an 8 x 8 mesh.

    Args:
      sizes: total number of devices along each axis.
      slices: number of slices along some axes, which divides the axis size. None divides the slices over the first
        axes that allow it. Only TPUs have slices; elsewhere each process counts as one.
      devices: as many as the product of the sizes.

    Raises:
      ConfigError: slices that do not fit the axes or the devices.
    """
    by_process = slices is not None and devices[0].platform != "tpu" and len(_group(devices, "slice_index")) == 1
    groups = _group(devices, "process_index" if by_process else "slice_index")
    numbers = _choose_slices(sizes, len(groups)) if slices is None else _check_slices(slices, sizes, groups, by_process)
    # `mesh_utils` takes two factors of each axis: the part within a slice and the part between slices.
    within = [size // numbers.get(name, 1) for name, size in sizes.items()]
    try:
        if len(groups) == 1:
            return mesh_utils.create_device_mesh(within, devices, allow_split_physical_axes=True)
        if len(set(groups.values())) > 1:
            raise ConfigError(f"devices must be as many of each slice, got {dict(groups)}; change `devices`")
        logger.info("Slices along the axes of the mesh: %s", numbers)
        between = [numbers.get(name, 1) for name in sizes]
        return mesh_utils.create_hybrid_device_mesh(
            within, between, devices, process_is_granule=by_process, allow_split_physical_axes=True
        )
    except AssertionError as error:  # of `mesh_utils`, for chips with a hole between them
        raise ConfigError(
            f"devices must be all chips of a slice, or a part of it without holes, got {len(devices)}"
        ) from error


def _group(devices: Sequence[jax.Device], name: str) -> collections.Counter[int]:
    """Return the number of devices by slice or process; devices in a single slice may have no index."""
    return collections.Counter(getattr(device, name, 0) for device in devices)


def _choose_slices(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide slices over the first mesh axes that allow it, `data` above all, which exchanges least."""
    numbers = {}
    for name, size in sizes.items():
        # As many slices as divide the axis; what is left goes to the next one.
        if (number := math.gcd(size, count)) > 1:
            numbers[name] = number
            count //= number
    return numbers


def _check_slices(
    slices: object, sizes: Mapping[str, int], groups: Mapping[int, int], by_process: bool
) -> Mapping[str, int]:
    """Return the given number of slices along each axis, if they fit the axes and the devices."""
    if not isinstance(slices, Mapping):
        raise ConfigError(f"mesh.slices must be a number of slices along each axis, as in dict(data=2), got {slices!r}")
    for name, number in slices.items():
        if name not in sizes:
            hint = closest(str(name), tuple(sizes))
            raise ConfigError(f"mesh.slices: an axis must be one of {tuple(sizes)}, got {name!r}{hint}")
        # `True` is an int of Python.
        if isinstance(number, bool) or not isinstance(number, int) or number < 1 or sizes[name] % number:
            raise ConfigError(
                f"mesh.slices.{name} must be a number of slices that divides the size of the axis, {sizes[name]}, "
                f"got {number!r}"
            )
    if math.prod(slices.values()) != len(groups):
        kind = "processes, which count as slices on these devices" if by_process else "slices of the devices"
        raise ConfigError(
            f"mesh.slices: the product of the numbers must be the number of {kind}, {len(groups)}, got {dict(slices)}"
        )
    return slices
