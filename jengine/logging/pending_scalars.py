"""Buffer scalars until they are read, so that the training loop never waits for the device."""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np


class _Segment:
    """Hold consecutive values of one scalar that have the same sample count, with their steps."""

    __slots__ = ("count", "num_taken", "steps", "values")

    def __init__(self, count: int) -> None:
        self.count = count
        self.steps: list[int] = []
        self.values: list[Any] = []
        self.num_taken = 0

    def take(self, step: float) -> tuple[list[int], list[float]]:
        """Remove and return the steps up to and including `step`, and their values."""
        start, self.num_taken = self.num_taken, bisect.bisect_right(self.steps, step, self.num_taken)
        return self.steps[start : self.num_taken], self.values[start : self.num_taken]


class PendingScalars:
    """Buffer scalars on the host and on the device, in the order in which they are added.

    Attributes:
      rows: the scalars that were not fetched yet: (key, value, step, number of samples), with a number or an array of
        one element; or (key, values, first step, indices), with an array of a value per step and the indices of those
        to keep. Callers append to it, since a step has several scalars.
      size: number of values in `rows`, counted by the callers.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, Any, int, int | Sequence[int]]] = []
        self.size = 0
        self._segments: dict[str, list[_Segment]] = {}

    def fetch(self) -> bool:
        """Transfer all device arrays to the host at once, waiting until they are computed.

        Returns:
          True if there were arrays to transfer.

        Raises:
          RuntimeError: the device failed, or an array was donated. All pending values are dropped.
        """
        rows, self.rows, self.size = self.rows, [], 0
        arrays = [value for _, value, _, _ in rows if type(value) is not float]
        try:
            fetched = iter(fetch_arrays(arrays))
        except RuntimeError as error:
            self._segments = {}
            deleted = {key for key, array, *_ in rows if isinstance(array, jax.Array) and array.is_deleted()}
            if deleted:
                error.add_note(f"{sorted(deleted)} were logged from donated arrays: log outputs of the step instead")
            raise
        for key, value, step, count in rows:
            if isinstance(count, int):
                segment = self._get_segment(key, count)
                segment.values.append(value if type(value) is float else next(fetched).item())
                segment.steps.append(step)
            else:
                segment = self._get_segment(key, 1)
                segment.values += next(fetched)[list(count)].tolist()
                segment.steps += [step + i for i in count]
        return bool(arrays)

    def take(self, step: float) -> Iterator[tuple[str, list[int], list[float], int]]:
        """Remove the fetched values up to and including `step`.

        Yields:
          The key, the steps of its values, the values in order, and the number of samples in each.
        """
        for key, segments in self._segments.items():
            for segment in segments:
                steps, values = segment.take(step)
                if values:
                    yield key, steps, values, segment.count
        if step == math.inf:
            self._segments = {}

    def _get_segment(self, key: str, count: int) -> _Segment:
        """Return the last segment of the key, or a new one if its sample count differs."""
        segments = self._segments.setdefault(key, [])
        if not segments or segments[-1].count != count:
            segments.append(_Segment(count))
        return segments[-1]


def fetch_arrays(arrays: list[Any]) -> list[np.ndarray]:
    """Return the arrays on the host: with one `jax.device_get`, or without a copy if they are on the CPU."""
    on_cpu = all(isinstance(array, np.ndarray) or _is_on_cpu(array) for array in arrays[:1])
    return [np.asarray(array) for array in arrays] if on_cpu else jax.device_get(arrays)


def _is_on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"
