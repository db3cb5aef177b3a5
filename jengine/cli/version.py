"""Print versions and devices, for bug reports."""

import argparse
import collections
import platform
from typing import Any

import jengine


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
    from jengine.versions import package_versions

    versions = [("jengine", jengine.__version__), ("python", f"{platform.python_version()} on {platform.platform()}")]
    versions += package_versions().items()
    return "\n".join(f"{name} {version}" for name, version in [*versions, ("devices:", _describe_devices())])


def _describe_devices() -> str:
    import jax

    from jengine.versions import describe_device

    try:
        devices = jax.local_devices()
    except RuntimeError as error:  # JAX_PLATFORMS names a platform that is not here, or a driver is missing
        return f"none ({error})"
    counts = collections.Counter(map(describe_device, devices))
    return ", ".join(f"{count} x {kind}" for kind, count in counts.items())
