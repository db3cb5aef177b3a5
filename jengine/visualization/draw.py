"""Drawing onto images: classes of pixels, masks of objects, boxes and labels."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Color = tuple[int, int, int]


def default_palette(count: int) -> list[Color]:
    """The colours of `count` classes, RGB: those of the PASCAL VOC colour map, of which the first is black.

    The bits of the class number are dealt out to red, green and blue in turn, from the highest bit of each down, so
    that small numbers get colours that are far apart.
    """
    colors = []
    for number in range(count):
        color = [0, 0, 0]
        for bit in range(24):
            color[bit % 3] |= (number >> bit & 1) << (7 - bit // 3)
        colors.append((color[0], color[1], color[2]))
    return colors


def as_rgb(image: Any) -> np.ndarray:
    """An image as uint8[H, W, 3].

    Args:
      image: [H, W] or [H, W, C] with C of 1, 3 or 4 (the fourth is dropped); uint8, bool, or floats from 0 to 1, which
        are clipped to that range.

    Raises:
      ValueError: another shape. TypeError: another dtype.
    """
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(f"an image has the shape (height, width, 1 or 3 or 4 channels), found {array.shape}")
    if array.dtype == bool or np.issubdtype(array.dtype, np.floating):
        array = (np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1) * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise TypeError(f"an image is uint8 (0 to 255) or float (0 to 1), found {array.dtype}")
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array[..., :3].copy()


def draw_sem_seg(image: np.ndarray, labels: np.ndarray, palette: Sequence[Color], alpha: float = 0.8) -> np.ndarray:
    """An image with the class of each pixel laid over it.

    Args:
      image: uint8[H, W, 3].
      labels: int[H, W], class numbers; pixels whose number has no colour stay as they are.
      palette: the colour of each class.
      alpha: weight of the colour; the image has the rest.

    Raises:
      ValueError: labels of another size than the image.
    """
    labels = np.asarray(labels)
    if labels.shape != image.shape[:2]:
        raise ValueError(f"the labels {labels.shape} are not of the size of the image {image.shape[:2]}")
    known = (labels >= 0) & (labels < len(palette))
    colors = np.asarray(palette, np.float32)[np.where(known, labels, 0)]
    mixed = (image * (1 - alpha) + colors * alpha).astype(np.uint8)
    return np.where(known[..., None], mixed, image)


def draw_masks(image: np.ndarray, masks: np.ndarray, colors: Sequence[Color], alpha: float = 0.5) -> np.ndarray:
    """An image with the masks of objects laid over it, in order.

    Args:
      image: uint8[H, W, 3].
      masks: bool[N, H, W].
      colors: one for each mask.
      alpha: weight of the colour.
    """
    drawn = image
    for mask, color in zip(np.asarray(masks, bool), colors, strict=True):
        drawn = draw_sem_seg(drawn, np.where(mask, 0, -1), [color], alpha)
    return drawn


def draw_boxes(
    image: np.ndarray, boxes: np.ndarray, colors: Sequence[Color], texts: Sequence[str] = (), width: int = 1
) -> np.ndarray:
    """An image with boxes and a text at the upper left corner of each.

    Args:
      image: uint8[H, W, 3].
      boxes: float[N, 4], left, top, right, bottom in pixels.
      colors: one for each box.
      texts: one for each box, or none at all.
      width: of the lines, in pixels.
    """
    canvas, pen = _canvas(image)
    boxes = np.asarray(boxes, np.float32).reshape(-1, 4)
    for box, color in zip(boxes, colors, strict=True):
        left, top, right, bottom = (float(side) for side in box)
        corners = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        pen.rectangle(corners, outline=color, width=width)
    for text, box, color in zip(texts, boxes, colors, strict=True) if texts else ():
        _write(pen, (float(box[0]), float(box[1])), text, color)
    return np.asarray(canvas).copy()


def draw_texts(
    image: np.ndarray, positions: Sequence[tuple[float, float]], texts: Sequence[str], colors: Sequence[Color]
) -> np.ndarray:
    """An image with texts, each on a ground of its colour, whose upper left corner is at its position (x, y)."""
    canvas, pen = _canvas(image)
    for position, text, color in zip(positions, texts, colors, strict=True):
        _write(pen, position, text, color)
    return np.asarray(canvas).copy()


def enlarge(image: np.ndarray, factor: int) -> np.ndarray:
    """Every pixel of an array [H, W, ...] as a square of `factor` by `factor` pixels."""
    return image if factor == 1 else image.repeat(factor, axis=0).repeat(factor, axis=1)


def _write(pen: Any, position: tuple[float, float], text: str, color: Color) -> None:
    ground = pen.textbbox(position, text)
    pen.rectangle(ground, fill=color)
    light = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]  # the luma of ITU-R BT.601
    pen.text(position, text, fill=(0, 0, 0) if light > 127 else (255, 255, 255))


def _canvas(image: np.ndarray) -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ImportError("drawing needs Pillow: pip install 'jengine[draw]'") from error
    canvas = Image.fromarray(np.ascontiguousarray(image))
    return canvas, ImageDraw.Draw(canvas)
