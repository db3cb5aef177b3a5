"""Drawing of pixel classes, object masks, boxes and labels onto images."""

import functools
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import ArrayLike

from jengine.logging.convert import import_pillow

if TYPE_CHECKING:
    from PIL import Image, ImageDraw

Color = tuple[int, int, int]


def default_palette(count: int) -> list[Color]:
    """Return the RGB colors of `count` classes from the PASCAL VOC color map, which starts with
    black.

    Examples:
      >>> default_palette(3)
      [(0, 0, 0), (128, 0, 0), (0, 128, 0)]
    """
    # The bits of the class index go to red, green and blue in turn, starting from the highest bit
    # of each channel, so that small indices get clearly different colors.
    colors = np.zeros((count, 3), int)
    for bit in range(24):
        colors[:, bit % 3] |= (np.arange(count) >> bit & 1) << (7 - bit // 3)
    return [(r, g, b) for r, g, b in colors.tolist()]


def to_rgb(image: ArrayLike) -> np.ndarray:
    """Convert an image to uint8[H, W, 3].

    Args:
      image: [H, W] or [H, W, C] with C of 1, 3 or 4 (alpha is dropped); uint8, bool, or floats,
        which are clipped to [0, 1].
    """
    array = np.asarray(image)
    if array.ndim == 2:
        array = array[..., None]
    if array.ndim != 3 or array.shape[-1] not in (1, 3, 4):
        raise ValueError(
            "`image` must have shape [height, width, channels] with 1, 3 or 4 channels, got "
            f"{array.shape}"
        )
    if array.dtype == bool or np.issubdtype(array.dtype, np.floating):
        # Casting a NaN to uint8 has an undefined result.
        array = (
            (np.clip(np.nan_to_num(array.astype(np.float32)), 0, 1) * 255).round().astype(np.uint8)
        )
    if array.dtype != np.uint8:
        raise TypeError(f"`image` must be uint8 (0 to 255) or float (0 to 1), got {array.dtype}")
    return np.repeat(array, 3, axis=-1) if array.shape[-1] == 1 else array[..., :3].copy()


def draw_sem_seg(
    image: np.ndarray, labels: np.ndarray, palette: Sequence[Color], alpha: float = 0.8
) -> np.ndarray:
    """Overlay pixel classes on an image.

    Args:
      image: uint8[H, W, 3].
      labels: int[H, W], class indices; pixels whose class has no color are unchanged.
      palette: one color per class.
      alpha: weight of the color; the image has weight `1 - alpha`.
    """
    labels = np.asarray(labels)
    if labels.shape != image.shape[:2]:
        raise ValueError(
            f"`labels` must have the size of the image, {image.shape[:2]}, got {labels.shape}"
        )
    # Other labels, such as 255 for pixels to ignore, leave the image as it is.
    has_color = (labels >= 0) & (labels < len(palette))
    colors = np.asarray(palette, np.float32)[np.where(has_color, labels, 0)]
    blended = (image * (1 - alpha) + colors * alpha).astype(np.uint8)
    return np.where(has_color[..., None], blended, image)


def draw_masks(
    image: np.ndarray, masks: np.ndarray, colors: Sequence[Color], alpha: float = 0.5
) -> np.ndarray:
    """Overlay object masks, bool[N, H, W], on an image, uint8[H, W, 3], with one color per mask."""
    for mask, color in zip(np.asarray(masks, bool), colors, strict=True):
        image = draw_sem_seg(image, np.where(mask, 0, -1), [color], alpha)
    return image


def draw_boxes(
    image: np.ndarray,
    boxes: np.ndarray,
    colors: Sequence[Color],
    texts: Sequence[str] = (),
    width: int = 1,
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
    for (left, top, right, bottom), color in zip(boxes.tolist(), colors, strict=True):
        # Pillow rejects corners in another order, which an untrained detector predicts.
        corners = (min(left, right), min(top, bottom), max(left, right), max(top, bottom))
        pen.rectangle(corners, outline=color, width=width)
    # After all boxes, so that no line crosses a text.
    for text, (left, top, *_), color in (
        zip(texts, boxes.tolist(), colors, strict=True) if texts else ()
    ):
        _draw_text(canvas, pen, (left, top), text, color)
    return np.asarray(canvas).copy()


def draw_texts(
    image: np.ndarray,
    positions: Sequence[tuple[float, float]],
    texts: Sequence[str],
    colors: Sequence[Color],
) -> np.ndarray:
    """Draw texts on backgrounds of the given colors, centered at `positions`, (x, y), but inside
    the image.
    """
    canvas, pen = _open_canvas(image)
    for position, text, color in zip(positions, texts, colors, strict=True):
        _draw_text(canvas, pen, position, text, color, is_centered=True)
    return np.asarray(canvas).copy()


def add_captions(image: np.ndarray, texts: Sequence[str]) -> np.ndarray:
    """Write lines of text in a black strip above an image, uint8[H, W, 3], which is widened for
    them.
    """
    if not texts:
        return image
    _, pen = _open_canvas(image)
    text = "\n".join(texts)
    font = _fonts()[0]
    margin = 2
    left, top, right, bottom = (
        round(side) for side in pen.multiline_textbbox((0, 0), text, font=font)
    )
    strip = np.zeros((bottom - top + 2 * margin, right - left + 2 * margin, 3), np.uint8)
    canvas, pen = _open_canvas(strip)
    pen.multiline_text((margin - left, margin - top), text, font=font, fill=(255, 255, 255))
    width = max(strip.shape[1], image.shape[1])
    parts = (np.asarray(canvas), image)
    return np.concatenate(
        [np.pad(part, ((0, 0), (0, width - part.shape[1]), (0, 0))) for part in parts]
    )


def place_side_by_side(images: Sequence[np.ndarray]) -> np.ndarray:
    """Return images uint8[H, W, 3] next to each other, the lower ones with black below them."""
    height = max(len(image) for image in images)
    return np.concatenate(
        [np.pad(i, ((0, height - len(i)), (0, 0), (0, 0))) for i in images], axis=1
    )


def enlarge(image: np.ndarray, factor: int) -> np.ndarray:
    """Enlarge an array [H, W, ...] by repeating each pixel `factor` times in both directions."""
    return image if factor == 1 else image.repeat(factor, axis=0).repeat(factor, axis=1)


def _draw_text(
    canvas: "Image.Image",
    pen: "ImageDraw.ImageDraw",
    position: tuple[float, float],
    text: str,
    color: Color,
    is_centered: bool = False,
) -> None:
    """Draw a text with its upper left corner or center at `position`, moved, reduced and cut to
    be in the image.
    """
    text, font = _fit(pen, text, canvas.size)
    if not text:
        return
    left, top, right, bottom = pen.textbbox((0, 0), text, font=font)
    x, y = position
    if is_centered:
        x = x - (right - left) / 2
        y = y - (bottom - top) / 2
    width, height = canvas.size
    x = min(max(round(x), 0), width - 1 - int(right - left))
    y = min(max(round(y), 0), height - 1 - int(bottom - top))
    pen.rectangle((x, y, x + right - left, y + bottom - top), fill=color)
    luma = 0.299 * color[0] + 0.587 * color[1] + 0.114 * color[2]  # ITU-R BT.601
    pen.text(
        (x - left, y - top), text, font=font, fill=(0, 0, 0) if luma > 127 else (255, 255, 255)
    )


def _fit(pen: "ImageDraw.ImageDraw", text: str, size: tuple[int, int]) -> tuple[str, Any]:
    """Return the text with the largest font in which it fits into `size`, width and height.

    If it fits in none, return the longest beginning that fits, in the smallest font.
    """
    width, height = size
    fonts = _fonts()
    # Smaller letters first, then fewer of them.
    candidates = [(text, font) for font in fonts] + [
        (text[:end], fonts[-1]) for end in range(len(text) - 1, 0, -1)
    ]
    for part, font in candidates:
        left, top, right, bottom = pen.textbbox((0, 0), part, font=font)
        if right - left < width and bottom - top < height:
            return part, font
    return "", fonts[-1]


@functools.cache
def _fonts() -> list[Any]:
    """Return Pillow's default font in label sizes, in pixels, from the largest to the smallest
    legible one.
    """
    return [import_pillow("drawing").ImageFont.load_default(size) for size in (12, 11, 10, 9, 8, 7)]


def _open_canvas(image: np.ndarray) -> "tuple[Image.Image, ImageDraw.ImageDraw]":
    pillow = import_pillow("drawing")
    canvas = pillow.Image.fromarray(np.ascontiguousarray(image))
    return canvas, pillow.ImageDraw.Draw(canvas)
