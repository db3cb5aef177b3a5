"""Contact sheet: a PNG file with a grid of images and captions."""

import math
import os
from collections.abc import Sequence

import numpy as np

from jengine.logging.convert import import_pillow

_SIDE = 128  # of an image on the sheet, at most, in pixels
_MARGIN = 4
_LINE = 14


def write_contact_sheet(path: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write images, uint8 or float [H, W, C] with C of 1, 3 or 4, in rows from the top left.

    "" is no caption.
    """
    import_pillow("--sheet")
    from PIL import Image, ImageDraw, ImageOps

    columns = math.ceil(math.sqrt(len(images)))
    width = _SIDE + _MARGIN
    height = width + (_LINE if any(captions) else 0)
    size = columns * width + _MARGIN, math.ceil(len(images) / columns) * height + _MARGIN
    sheet = Image.new("RGB", size, "white")
    draw = ImageDraw.Draw(sheet)
    for i, (pixels, caption) in enumerate(zip(to_uint8(images), captions, strict=True)):
        place = _MARGIN + i % columns * width, _MARGIN + i // columns * height
        image = Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
        is_small = max(image.size) <= _SIDE
        method = Image.Resampling.NEAREST if is_small else Image.Resampling.BILINEAR
        image = ImageOps.contain(image, (_SIDE, _SIDE), method)
        sheet.paste(image, place, image if image.mode == "RGBA" else None)
        # By measured width: the letters of the font differ, and a caption must not run into the
        # next image.
        while draw.textlength(caption) > _SIDE:
            caption = caption[:-1]
        draw.text((place[0], place[1] + _SIDE), caption, fill="black")
    os.makedirs(os.path.dirname(os.path.abspath(path)), exist_ok=True)
    sheet.save(path, format="PNG")


def to_uint8(images: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return images as uint8.

    Floats are scaled from their finite range in all images, others become 0.

    >>> to_uint8([np.array([[[-1.0], [0.0]]]), np.array([[[1.0], [np.nan]]])])[1].ravel().tolist()
    [255, 0]
    """
    if images[0].dtype == np.uint8:
        return list(images)
    # One range for all images: a dark image among bright ones should look dark.
    values = np.concatenate([image.astype(np.float32).ravel() for image in images])
    values = values[np.isfinite(values)]
    low, high = (values.min(), values.max()) if values.size else (0.0, 1.0)
    scale = 255 / ((high - low) or 1.0)
    scaled = [(image.astype(np.float32) - low) * scale for image in images]
    finite = [np.nan_to_num(image, nan=0.0, posinf=0.0, neginf=0.0) for image in scaled]
    return [image.round().clip(0, 255).astype(np.uint8) for image in finite]
