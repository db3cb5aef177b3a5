"""Print versions and devices, for bug reports."""

import argparse
import collections
import importlib.metadata
import platform
from typing import Any

import jengine

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy")


class VersionAction(argparse.Action):
    """Print the versions of jengine and of what it runs on, and exit."""

    def __init__(self, option_strings: Any, dest: str, **settings: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, help="print versions and devices, for bug reports", **settings)

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        """Print the versions and exit."""
        print(describe_versions())
        parser.exit()


def describe_versions() -> str:
    """Return the versions of jengine, Python and the libraries, and the devices, a line each."""
    versions = [("jengine", jengine.__version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    versions += [(package, importlib.metadata.version(package)) for package in _PACKAGES]
    return "\n".join(f"{name} {version}" for name, version in [*versions, ("devices:", _describe_devices())])


def _describe_devices() -> str:
    import jax

    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not here, or a driver is missing
        return f"none ({error})"
    counts = collections.Counter(
        d.platform if d.device_kind == d.platform else f"{d.platform} ({d.device_kind})" for d in devices
    )
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
