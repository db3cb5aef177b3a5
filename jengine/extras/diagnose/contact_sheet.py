"""Contact sheet: a PNG file with a grid of images and captions."""

import math
import os
import types
from collections.abc import Sequence
from typing import Any

import numpy as np

from jengine.logging.convert import import_pillow

_SIDE = 128  # of an image on the sheet, at most, in pixels
_MARGIN = 4
_LINE = 14
_WHITE = (255, 255, 255)
_BLACK = (0, 0, 0)


def write_contact_sheet(path: str, images: Sequence[np.ndarray], captions: Sequence[str]) -> None:
    """Write images, uint8 or float [H, W, C] with C of 1, 3 or 4, in rows from the top left.

    "" is no caption.
    """
    pillow = import_pillow("--sheet")
    columns = math.ceil(math.sqrt(len(images)))
    cell = _SIDE + _MARGIN, _SIDE + _MARGIN + (_LINE if any(captions) else 0)
    rows = math.ceil(len(images) / columns)
    sheet = pillow.Image.new("RGB", (columns * cell[0] + _MARGIN, rows * cell[1] + _MARGIN), _WHITE)
    draw = pillow.ImageDraw.Draw(sheet)
    for i, (pixels, caption) in enumerate(zip(to_uint8(images), captions, strict=True)):
        left, top = (
            _MARGIN + index * size
            for index, size in zip((i % columns, i // columns), cell, strict=True)
        )
        image = _fit(pillow, pixels)
        sheet.paste(image, (left, top), image if image.mode == "RGBA" else None)
        # By measured width: the letters of the font differ, and a caption must not run into the
        # next image.
        while draw.textlength(caption) > _SIDE:
            caption = caption[:-1]
        draw.text((left, top + _SIDE), caption, fill=_BLACK)
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
    floats = [image.astype(np.float32) for image in images]
    finite = [image[np.isfinite(image)] for image in floats]
    # One range for all images: a dark image among bright ones should look dark.
    low = min((float(values.min()) for values in finite if values.size), default=0.0)
    high = max((float(values.max()) for values in finite if values.size), default=1.0)
    scale = 255 / ((high - low) or 1.0)
    return [
        np.where(
            np.isfinite(image), np.round((np.nan_to_num(image) - low) * scale).clip(0, 255), 0
        ).astype(np.uint8)
        for image in floats
    ]


def _fit(pillow: types.ModuleType, pixels: np.ndarray) -> Any:
    """Return an image with at most `_SIDE` pixels a side.

    Small ones are enlarged by a whole number.
    """
    image = pillow.Image.fromarray(pixels[..., 0] if pixels.shape[-1] == 1 else pixels)
    side = max(image.size)
    factor = float(_SIDE // side) if side <= _SIDE else _SIDE / side
    method = pillow.Image.Resampling.NEAREST if factor >= 1 else pillow.Image.Resampling.BILINEAR
    width, height = (max(1, round(length * factor)) for length in image.size)
    return image.resize((width, height), method)
