"""Histograms of arrays, binned once for all backends."""

from typing import Any, NamedTuple

import numpy as np


class Histogram(NamedTuple):
    """How the elements of an array are distributed; those that are not finite are left out."""

    counts: np.ndarray  # int64[B]
    edges: np.ndarray  # float64[B + 1], ascending
    mean: float  # of the elements, not of the bins; NaN where there are none
    std: float


def histogram(values: Any, bins: int = 64) -> Histogram:
    """Bins the elements of an array between the least and the greatest.

    Args:
      values: array of numbers of any shape; one that is on a device is waited for.
      bins: number of bins.

    Raises:
      TypeError: `values` holds no real numbers.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "biufV":  # V: bfloat16 and its like
        raise TypeError(f"a histogram is of numbers, found {array.dtype}")
    array = array.astype(np.float64).ravel()
    array = array[np.isfinite(array)]
    counts, edges = np.histogram(array, bins)
    mean, std = (float(array.mean()), float(array.std())) if array.size else (float("nan"), float("nan"))
    return Histogram(counts.astype(np.int64), edges, mean, std)
