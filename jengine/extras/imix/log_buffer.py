"""Event buffer between hooks and writers: validation results, images and histograms."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

BINS = 800


class Result(NamedTuple):
    """Validation metrics after an iteration."""

    metrics: Mapping[str, float]
    step: int


class Image(NamedTuple):
    """Image in an iteration."""

    name: str
    data: Any  # uint8[H, W, C], or f[H, W, C] from 0 to 1; C is 1, 3 or 4
    step: int


class Bins(NamedTuple):
    """Histogram of an array in an iteration."""

    name: str
    counts: Any  # f32[800]
    edges: Any  # f32[801]
    mean: Any  # f32[]
    std: Any  # f32[]
    step: int


class LogBuffer:
    """Events that hooks have added since the last write; training metrics are in the message hub.

    The host does not wait for the device: histograms are computed there and transferred when they
    are written. With several processes all of them add the same events, and the first one keeps
    them.

    Args:
      keep: whether a writer accepts events; otherwise they are dropped.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.results: list[Result] = []
        self.images: list[Image] = []
        self.histograms: list[Bins] = []

    def put_result(self, metrics: Mapping[str, float], step: int) -> None:
        """Add the metrics of a validation, host numbers by name."""
        if self.keep and jax.process_index() == 0:
            self.results.append(Result(dict(metrics), step))

    def put_image(self, name: str, data: ArrayLike, step: int) -> None:
        """Add an image: uint8[H, W, C], or floats from 0 to 1; C is 1, 3 or 4."""
        if self.keep and jax.process_index() == 0:
            self.images.append(
                Image(name, jnp.copy(data) if isinstance(data, jax.Array) else np.copy(data), step)
            )

    def put_histogram(self, name: str, data: ArrayLike, step: int) -> None:
        """Add a histogram of the finite elements in an array of real numbers."""
        if self.keep:
            # on all processes: `data` may be a global array
            histogram = _compute_histogram(jnp.asarray(data))
            if jax.process_index() == 0:
                counts, edges, mean, std = histogram
                self.histograms.append(Bins(name, counts, edges, mean, std, step))

    def pop_all(self) -> tuple[list[Result], list[Image], list[Bins]]:
        """Return all events as host arrays, and clear the buffer."""
        events = self.results, *jax.device_get((self.images, self.histograms))
        self.results = []
        self.images = []
        self.histograms = []
        return events


def to_uint8(data: np.ndarray) -> np.ndarray:
    """Convert an image with floats from 0 to 1 to uint8; return an integer image unchanged.

    >>> to_uint8(np.array([0.0, 0.5, 1.0])).tolist()
    [0, 128, 255]
    """
    if not jnp.issubdtype(data.dtype, jnp.floating):
        return data
    return np.round(np.clip(data.astype(np.float32), 0, 1) * 255).astype(np.uint8)


@jax.jit
def _compute_histogram(data: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Return counts f32[800], edges f32[801], mean and standard deviation f32[] of the finite
    elements.
    """
    values = data.ravel().astype(jnp.float32)
    is_finite = jnp.isfinite(values)
    any_finite = is_finite.any()
    low = jnp.where(any_finite, jnp.min(values, where=is_finite, initial=jnp.inf), 0.0)
    high = jnp.where(any_finite, jnp.max(values, where=is_finite, initial=-jnp.inf), 1.0)
    safe = jnp.where(is_finite, values, low)  # weighted with 0 below, so that the shape is fixed
    counts, edges = jnp.histogram(
        safe, BINS, range=(low, high), weights=is_finite.astype(jnp.float32)
    )
    return counts, edges, values.mean(where=is_finite), values.std(where=is_finite)
