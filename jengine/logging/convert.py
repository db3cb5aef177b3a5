"""Conversion of scalars, histograms, images and models to the data types that backends write."""

import io
import math
import pathlib
import types
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from jengine.config.errors import require_extra

_REAL_KINDS = "biufV"  # V: bfloat16 and other ml_dtypes


class Histogram(NamedTuple):
    """Distribution of the finite elements in an array."""

    counts: np.ndarray  # int64[B]
    edges: np.ndarray  # float64[B + 1], ascending
    mean: float  # over the elements, not the bins; NaN without elements
    std: float


def histogram(values: ArrayLike, bins: int = 64) -> Histogram:
    """Bin an array of real numbers, of any shape, between minimum and maximum.

    Skip NaN and infinity.

    Examples:
      >>> histogram([0.0, 1.0, 1.0, np.nan], bins=2).counts
      array([1, 2])
    """
    array = np.asarray(values)
    if array.dtype.kind not in _REAL_KINDS:
        raise TypeError(f"`values` of a histogram must be real numbers, got {array.dtype}")
    array = array.astype(np.float64).ravel()
    array = array[np.isfinite(array)]  # np.histogram refuses others
    counts, edges = np.histogram(array, bins)
    mean, std = (float(array.mean()), float(array.std())) if array.size else (math.nan, math.nan)
    return Histogram(counts.astype(np.int64), edges, mean, std)


def to_pixels(image: np.ndarray) -> np.ndarray:
    """Return an image as most libraries expect it: a gray one as [H, W].

    Args:
      image: uint8[H, W, C] with C of 1 (gray), 3 (RGB) or 4 (RGBA).

    Raises:
      TypeError: wrong dtype. ImportError: Pillow, which they need, is not installed.
    """
    array = np.asarray(image)
    if array.dtype != np.uint8:
        raise TypeError(f"`image` must be uint8 (0 to 255), got {array.dtype}")
    import_pillow("writing images")
    return array[..., 0] if array.shape[-1] == 1 else array


def resize_nearest(array: np.ndarray, size: tuple[int, int]) -> np.ndarray:
    """Resize class indices or a mask, [h, w], to [H, W] by nearest neighbors."""
    array = np.asarray(array)
    if array.shape == size:
        return array
    rows, columns = (
        # Pixel centers, so that the result is not shifted by half a pixel.
        ((np.arange(new) + 0.5) * old / new).astype(int)
        for new, old in zip(size, array.shape, strict=True)
    )
    return array[rows[:, None], columns[None, :]]


def import_pillow(need: str) -> types.ModuleType:
    """Return the package `PIL`, or raise an error that names the extra and what needs it:
    'drawing'.
    """
    with require_extra("draw", f"{need} requires Pillow"):
        import PIL.Image
        import PIL.ImageDraw
        import PIL.ImageFont
        import PIL.ImageShow
    return PIL


def encode_png(image: np.ndarray) -> bytes:
    """Encode an image as PNG; arguments and errors as in `to_pixels`."""
    pixels = to_pixels(image)
    buffer = io.BytesIO()
    import_pillow("writing images").Image.fromarray(pixels).save(buffer, format="PNG")
    return buffer.getvalue()


def write_png(path: pathlib.Path, image: np.ndarray) -> None:
    """Write an image as a PNG file, in a directory that is created if needed.

    Errors as in `to_pixels`.
    """
    png = encode_png(image)  # first: a wrong image leaves no directory
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(png)


def format_graph(model: Any, data_batch: Any = None) -> str:
    """Return the text that the visualizer writes as the model graph.

    Args:
      model: the text itself, a function of a batch, or a model with `init(rng, batch)` and
        `predict(params, model_state, batch)`.
      data_batch: a pytree of arrays, for the jaxpr of the prediction, which is only traced; without
        it, the text is the repr of `model` (Flax modules list fields and submodules there).
    """
    if isinstance(model, str):
        return model
    if data_batch is None:
        return repr(model)
    import jax

    if hasattr(model, "init") and hasattr(model, "predict"):
        # Shapes only: the graph is drawn before the run has allocated its state.
        params, model_state = jax.eval_shape(model.init, jax.random.key(0), data_batch)
        return str(jax.make_jaxpr(model.predict)(params, model_state, data_batch))
    return str(jax.make_jaxpr(model)(data_batch))
