"""Shows an image in a window where there is a display."""

import os
import sys
import time

import numpy as np


def has_display() -> bool:
    """Whether a window could be seen: on Linux, whether a display server is named."""
    return not sys.platform.startswith("linux") or bool(os.environ.get("DISPLAY") or os.environ.get("WAYLAND_DISPLAY"))


def show_image(image: np.ndarray, title: str, wait_time: float = 0.0) -> bool:
    """Opens the system's image viewer.

    Args:
      image: uint8[H, W, 3].
      title: what the window is called, where the viewer has titles.
      wait_time: seconds to wait afterwards.

    Returns:
      Whether that was possible.
    """
    if not has_display():
        return False
    try:
        from PIL import Image, ImageShow
    except ImportError as error:
        raise ImportError("showing images needs Pillow: pip install 'jengine[draw]'") from error
    if not ImageShow.show(Image.fromarray(image), title):
        return False
    time.sleep(wait_time)
    return True
