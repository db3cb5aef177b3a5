"""Draw pixel classes, object masks, boxes and labels onto images."""

from collections.abc import Sequence
from typing import Any

import numpy as np

Color = tuple[int, int, int]


def default_palette(count: int) -> list[Color]:
    """Return the RGB colors of `count` classes from the PASCAL VOC color map, which starts with black.

    The bits of the class index are distributed over red, green and blue in turn, starting from the highest bit of each
    channel, so that small indices get clearly different colors.
    """
    colors = []
    for index in range(count):
        color = [0, 0, 0]
        for bit in range(24):
            color[bit % 3] |= (index >> bit & 1) << (7 - bit // 3)
        colors.append((color[0], color[1], color[2]))
    return colors


def to_rgb(image: Any) -> np.ndarray:
    """Convert an image to uint8[H, W, 3].

    Args:
      image: [H, W] or [H, W, C] with C of 1, 3 or 4 (alpha is dropped); uint8, bool, or floats, which are clipped to
        [0, 1].

    Raises:
      ValueError: wrong shape. TypeError: wrong dtype.
    """
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(
            f"`image` must have shape [height, width, channels] with 1, 3 or 4 channels, got {array.shape}"
        )
    if array.dtype == bool or np.issubdtype(array.dtype, np.floating):
        array = (np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1) * 255).round().astype(np.uint8)
    if array.dtype != np.uint8:
        raise TypeError(f"`image` must be uint8 (0 to 255) or float (0 to 1), got {array.dtype}")
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array[..., :3].copy()


def draw_sem_seg(image: np.ndarray, labels: np.ndarray, palette: Sequence[Color], alpha: float = 0.8) -> np.ndarray:
    """Overlay the class of each pixel on an image.

    Args:
      image: uint8[H, W, 3].
      labels: int[H, W], class indices; pixels whose class has no color are unchanged.
      palette: the color of each class.
      alpha: weight of the color; the image has weight `1 - alpha`.

    Raises:
      ValueError: `labels` and `image` differ in size.
    """
    labels = np.asarray(labels)
    if labels.shape != image.shape[:2]:
        raise ValueError(f"`labels` must have the size of the image, {image.shape[:2]}, got {labels.shape}")
    has_color = (labels >= 0) & (labels < len(palette))
    colors = np.asarray(palette, np.float32)[np.where(has_color, labels, 0)]
    blended = (image * (1 - alpha) + colors * alpha).astype(np.uint8)
    return np.where(has_color[..., None], blended, image)


def draw_masks(image: np.ndarray, masks: np.ndarray, colors: Sequence[Color], alpha: float = 0.5) -> np.ndarray:
    """Overlay object masks on an image, in order.

    Args:
      image: uint8[H, W, 3].
      masks: bool[N, H, W].
      colors: one color per mask.
      alpha: weight of the color.
    """
    for mask, color in zip(np.asarray(masks, bool), colors, strict=True):
        image = draw_sem_seg(image, np.where(mask, 0, -1), [color], alpha)
    return image


def draw_boxes(
    image: np.ndarray, boxes: np.ndarray, colors: Sequence[Color], texts: Sequence[str] = (), width: int = 1
) -> np.ndarray:
    """Draw boxes, with a text at the upper left corner of each.

    Args:
      image: uint8[H, W, 3].
      boxes: float[N, 4], left, top, right, bottom in pixels.
      colors: one color per box.
      texts: one text per box, or empty.
      width: line width in pixels.
    """
    canvas, pen = _open_canvas(image)
    boxes = np.asarray(boxes, np.float32).reshape(-1, 4)
    for box, color in zip(boxes, colors, strict=True):
        left, top, right, bottom = (float(side) for side in box)
        corners = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        pen.rectangle(corners, outline=color, width=width)
    for text, box, color in zip(texts, boxes, colors, strict=True) if texts else ():
        _draw_text(pen, (float(box[0]), float(box[1])), text, color)
    return np.asarray(canvas).copy()


def draw_texts(
    image: np.ndarray, positions: Sequence[tuple[float, float]], texts: Sequence[str], colors: Sequence[Color]
) -> np.ndarray:
    """Draw texts on backgrounds of the given colors; `positions` are their upper left corners, (x, y)."""
    canvas, pen = _open_canvas(image)
    for position, text, color in zip(positions, texts, colors, strict=True):
        _draw_text(pen, position, text, color)
    return np.asarray(canvas).copy()


def enlarge(image: np.ndarray, factor: int) -> np.ndarray:
    """Enlarge an array [H, W, ...] by repeating each pixel `factor` times in both directions."""
    return image if factor == 1 else image.repeat(factor, axis=0).repeat(factor, axis=1)


def _draw_text(pen: Any, position: tuple[float, float], text: str, color: Color) -> None:
    pen.rectangle(pen.textbbox(position, text), fill=color)
    luma = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]  # ITU-R BT.601
    pen.text(position, text, fill=(0, 0, 0) if luma > 127 else (255, 255, 255))


def _open_canvas(image: np.ndarray) -> tuple[Any, Any]:
    try:
        from PIL import Image, ImageDraw
    except ImportError as error:
        raise ImportError("drawing requires Pillow: pip install 'jengine[draw]'") from error
    canvas = Image.fromarray(np.ascontiguousarray(image))
    return canvas, ImageDraw.Draw(canvas)
