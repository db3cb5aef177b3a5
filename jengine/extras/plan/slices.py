"""Order of the devices of several slices, with a slower network between them, in a mesh."""

import logging
import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.experimental import mesh_utils

from jengine.config.errors import ConfigError, closest
from jengine.parallel.mesh import arrange_devices, group_devices

logger = logging.getLogger("jengine")


def arrange_slices(
    sizes: Mapping[str, int], slices: Mapping[str, int] | None, devices: Sequence[jax.Device]
) -> np.ndarray:
    """Return a device array in mesh shape, in which neighbours are close.

    Physical axes in a TPU slice are split where necessary, for instance 4 x 4 x 4 chips for an 8 x
    8 mesh.

    Args:
      sizes: total device count along each axis.
      slices: slice count along some axes, which divides the axis size. None divides the slices over
        the first axes that allow it. Only TPUs have slices; elsewhere each process counts as one.
      devices: as many as the product of the sizes.

    Raises:
      ConfigError: slices that do not fit the axes or the devices.
    """
    by_process = (
        slices is not None
        and devices[0].platform != "tpu"
        and len(group_devices(devices, "slice_index")) == 1
    )
    groups = group_devices(devices, "process_index" if by_process else "slice_index")
    numbers = (
        _choose_slices(sizes, len(groups))
        if slices is None
        else _check_slices(slices, sizes, groups, by_process)
    )
    # `mesh_utils` takes two factors of each axis: the part within a slice and the part between
    # slices.
    within = [size // numbers.get(name, 1) for name, size in sizes.items()]
    if len(groups) == 1:
        return arrange_devices(within, devices)
    if len(set(groups.values())) > 1:
        raise ConfigError(
            f"devices must be as many of each slice, got {dict(groups)}; change `devices`"
        )
    logger.info("Slices along the axes of the mesh: %s", numbers)
    between = [numbers.get(name, 1) for name in sizes]
    return mesh_utils.create_hybrid_device_mesh(
        within, between, devices, process_is_granule=by_process, allow_split_physical_axes=True
    )


def _choose_slices(sizes: Mapping[str, int], count: int) -> dict[str, int]:
    """Divide slices over the first mesh axes that allow it, `data` above all, which exchanges
    least.
    """
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
    """Return the given slice count along each axis, if they fit the axes and the devices."""
    if not isinstance(slices, Mapping):
        raise ConfigError(
            "mesh.slices must be a number of slices along each axis, as in dict(data=2), got "
            f"{slices!r}"
        )
    for name, number in slices.items():
        if name not in sizes:
            hint = closest(str(name), tuple(sizes))
            raise ConfigError(
                f"mesh.slices: an axis must be one of {tuple(sizes)}, got {name!r}{hint}"
            )
        # `True` is an int of Python.
        if (
            isinstance(number, bool)
            or not isinstance(number, int)
            or number < 1
            or sizes[name] % number
        ):
            raise ConfigError(
                f"mesh.slices.{name} must be a number of slices that divides the size of the "
                f"axis, {sizes[name]}, got {number!r}"
            )
    if math.prod(slices.values()) != len(groups):
        kind = (
            "processes, which count as slices on these devices"
            if by_process
            else "slices of the devices"
        )
        raise ConfigError(
            f"mesh.slices: the product of the numbers must be the number of {kind}, "
            f"{len(groups)}, got {dict(slices)}"
        )
    return slices
