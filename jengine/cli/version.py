"""Versions and devices, for bug reports."""

import collections
import platform

import jax

from jengine.versions import __version__, describe_device, package_versions


def describe_versions() -> str:
    """Return the versions of jengine, Python and the libraries, and the devices, a line each."""
    versions = [("jengine", __version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    try:
        counts = collections.Counter(map(describe_device, jax.local_devices()))
        devices = ", ".join(f"{count} x {kind}" for kind, count in counts.items())
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not here, or a driver is missing
        devices = f"none ({error})"
    return "\n".join(f"{name} {text}" for name, text in [*versions, *package_versions().items(), ("devices:", devices)])
