"""Versions of jengine, and of the packages and devices that the results of a run depend on."""

import functools
import platform
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # `import jengine` must not load it
    import jax

__version__ = "0.2.0"

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


@functools.cache
def package_versions() -> dict[str, str]:
    """Return the versions of the installed packages by name."""
    import importlib.metadata  # takes as long as the rest of `import jengine`

    return {name: importlib.metadata.version(name) for name in _PACKAGES}


def environment_versions() -> dict[str, str]:
    """Return the versions of Python, the platform and the packages, for the log and checkpoints."""
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        **package_versions(),
    }


def describe_device(device: "jax.Device") -> str:
    """Return the platform of a device and its kind: 'cpu', 'tpu (TPU v5 lite)'."""
    return (
        device.platform
        if device.device_kind == device.platform
        else f"{device.platform} ({device.device_kind})"
    )
