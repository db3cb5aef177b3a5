"""Windows for pictures."""

import os
import sys
import time

import numpy as np

from jengine.logging.convert import import_pillow


def has_display() -> bool:
    """Return whether windows can be shown; on Linux, whether a display server is set."""
    return not sys.platform.startswith("linux") or bool(
        os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY")
    )


def show_image(image: np.ndarray, title: str, wait_time: float = 0.0) -> bool:
    """Open an image, uint8[H, W, 3], in the system viewer and wait `wait_time` seconds.

    Return False without one.
    """
    if not has_display():
        return False
    pillow = import_pillow("showing images")
    if not pillow.ImageShow.show(pillow.Image.fromarray(image), title):
        return False
    time.sleep(wait_time)
    return True
