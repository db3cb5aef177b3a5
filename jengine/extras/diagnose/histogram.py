"""Histograms of arrays, binned on the device."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jengine.logging.convert import Histogram


class BinnedArray(NamedTuple):
    """Distribution of the finite elements in an array, on the device."""

    counts: jax.Array  # int32[B]
    low: jax.Array  # f32[], the least element
    high: jax.Array  # f32[], the greatest
    mean: jax.Array  # f32[]
    std: jax.Array  # f32[]


def bin_elements(array: jax.Array, bins: int, axis_name: str | None = None) -> BinnedArray:
    """Return the distribution of an array with equal bins between its extremes, as
    `numpy.histogram` does.

    >>> bin_elements(jnp.array([0.0, 1.0, 1.0, jnp.nan]), bins=2).counts
    Array([1, 2], dtype=int32)

    Args:
      array: floating, of any shape.
      bins: number of bins.
      axis_name: a mapped axis over which the elements are counted together.
    """
    lanes = (lambda x, reduce: reduce(x, axis_name)) if axis_name else (lambda x, reduce: x)
    x = array.astype(jnp.float32)
    finite = jnp.isfinite(x)
    low = lanes(jnp.where(finite, x, jnp.inf).min(initial=jnp.inf), jax.lax.pmin)
    high = lanes(jnp.where(finite, x, -jnp.inf).max(initial=-jnp.inf), jax.lax.pmax)
    # no finite element
    is_empty = low > high
    low = jnp.where(is_empty, 0.0, low)
    high = jnp.where(is_empty, 0.0, high)
    # numpy.histogram widens an empty range by one half to both sides
    start = jnp.where(low == high, low - 0.5, low)
    width = jnp.where(low == high, 1.0, high - low)
    index = jnp.clip(((x - start) / width * bins).astype(jnp.int32), 0, bins - 1)
    # A sum of comparisons, since a scatter is slow on accelerators and would gather shards
    hits = (index[..., None] == jnp.arange(bins)) & finite[..., None]
    counts = lanes(hits.sum(axis=tuple(range(x.ndim)), dtype=jnp.int32), jax.lax.psum)
    number = jnp.maximum(counts.sum(), 1).astype(jnp.float32)
    mean = lanes(jnp.where(finite, x, 0.0).sum(), jax.lax.psum) / number
    variance = lanes(jnp.where(finite, jnp.square(x - mean), 0.0).sum(), jax.lax.psum) / number
    return BinnedArray(counts, low, high, mean, jnp.sqrt(variance))


def to_histogram(binned: BinnedArray) -> Histogram:
    """Return a fetched distribution as a histogram."""
    edges = np.histogram_bin_edges(
        np.asarray([binned.low, binned.high], np.float64), len(binned.counts)
    )
    return Histogram(
        np.asarray(binned.counts, np.int64), edges, float(binned.mean), float(binned.std)
    )
