"""What scalars become before they are written."""

from typing import Any

import numpy as np


def to_number(value: Any) -> float | None:
    """A number, or an array of one, as a Python float; None for anything else."""
    if isinstance(value, bool | int | float):
        return float(value)
    if hasattr(value, "__array__"):
        array = np.asarray(value)
        if array.size == 1 and array.dtype.kind in "biufV":  # V: bfloat16 and its like
            return float(array.item())
    return None


def to_plain(value: Any) -> Any:
    """An array as Python's numbers, in lists unless it has one element; anything else as it is."""
    if not hasattr(value, "__array__"):
        return value
    array = np.asarray(value)
    return array.item() if array.size == 1 else array.tolist()
