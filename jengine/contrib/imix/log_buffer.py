"""What waits for the writers besides the numbers of training: results of validations, images, histograms."""

import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

BINS = 800


class Result(NamedTuple):
    """The metrics of a validation after an iteration."""

    metrics: Mapping[str, float]
    step: int


class Image(NamedTuple):
    """An image of an iteration."""

    name: str
    data: Any  # uint8[H, W, C], or f[H, W, C] from 0 to 1; C is 1, 3 or 4
    step: int


class Bins(NamedTuple):
    """How the elements of an array were distributed in an iteration."""

    name: str
    counts: Any  # f32[800]
    edges: Any  # f32[801]
    mean: Any  # f32[]
    std: Any  # f32[]
    step: int


class LogBuffer:
    """What hooks have put for the writers since these wrote last; the numbers of training are in the message hub.

    Nothing waits for the device here: a histogram is binned there, and leaves it when a writer wants it. With several
    processes all of them put the same, and the first keeps it.

    Args:
      keep: whether there is a writer that takes any of it.
    """

    def __init__(self, keep: bool) -> None:
        self.keep = keep
        self.results: list[Result] = []
        self.images: list[Image] = []
        self.histograms: list[Bins] = []

    def put_result(self, metrics: Mapping[str, float], step: int) -> None:
        """Keeps the metrics of a validation, host numbers by name."""
        if self.keep and jax.process_index() == 0:
            self.results.append(Result(dict(metrics), step))

    def put_image(self, name: str, data: Any, step: int) -> None:
        """Keeps an image.

        Args:
          name: what it is called.
          data: uint8[H, W, C], or floats from 0 to 1; C is 1, 3 or 4.
          step: the iteration.
        """
        if self.keep and jax.process_index() == 0:
            self.images.append(Image(name, jnp.copy(data) if isinstance(data, jax.Array) else np.copy(data), step))

    def put_histogram(self, name: str, data: Any, step: int) -> None:
        """Keeps how the elements of `data`, an array of real numbers, are distributed; those not finite are left out.

        Args:
          name: what it is called.
          data: array of any shape.
          step: the iteration.
        """
        if self.keep:
            binned = _binned(jnp.asarray(data))
            if jax.process_index() == 0:
                counts, edges, mean, std = binned
                self.histograms.append(Bins(name, counts, edges, mean, std, step))

    def take(self) -> tuple[list[Result], list[Image], list[Bins]]:
        """All that waits, on the host; then nothing waits any more."""
        waiting = self.results, *jax.device_get((self.images, self.histograms))
        self.results, self.images, self.histograms = [], [], []
        return waiting


def as_pixels(data: np.ndarray) -> np.ndarray:
    """An image as uint8, from floats from 0 to 1."""
    if not jnp.issubdtype(data.dtype, jnp.floating):
        return data
    return np.round(np.clip(data.astype(np.float32), 0, 1) * 255).astype(np.uint8)


@functools.partial(jax.jit, static_argnames="bins")
def _binned(data: jax.Array, bins: int = BINS) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Counts f32[bins], edges f32[bins + 1], mean and standard deviation f32[] of the elements that are finite."""
    values = data.ravel().astype(jnp.float32)
    real = jnp.isfinite(values)
    number = real.sum()
    low = jnp.where(number > 0, jnp.min(values, where=real, initial=jnp.inf), 0.0)
    high = jnp.where(number > 0, jnp.max(values, where=real, initial=-jnp.inf), 1.0)
    safe = jnp.where(real, values, low)
    counts, edges = jnp.histogram(safe, bins, range=(low, high), weights=real.astype(jnp.float32))
    return counts, edges, values.mean(where=real), values.std(where=real)
