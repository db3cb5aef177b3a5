"""Images as PNG."""

import io

import numpy as np


def encode_png(image: np.ndarray) -> bytes:
    """The PNG file of an image.

    Args:
      image: uint8[H, W, C]; C is 1 (grey), 3 (RGB) or 4 (RGBA).

    Raises:
      TypeError: another dtype. ValueError: another shape. ImportError: Pillow is not installed.
    """
    array = np.asarray(image)
    if array.dtype != np.uint8:
        raise TypeError(f"an image is uint8 (0 to 255), found {array.dtype}")
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image has the shape (height, width, 1 or 3 or 4 channels), found {array.shape}")
    try:
        from PIL import Image
    except ImportError as error:
        raise ImportError("writing images needs Pillow: pip install pillow") from error
    buffer = io.BytesIO()
    Image.fromarray(array[..., 0] if array.shape[-1] == 1 else array).save(buffer, format="PNG")
    return buffer.getvalue()
