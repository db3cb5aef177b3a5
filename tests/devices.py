"""Devices for tests that need several, of which an accelerator's machine may have one."""

import jax


def take_devices(count):
    """Return the first `count` devices; raise RuntimeError if there are fewer."""
    devices = jax.devices()
    if len(devices) < count:
        raise RuntimeError(f"this test needs {count} devices, there is {len(devices)}")
    return devices[:count]
