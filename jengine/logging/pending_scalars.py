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


# An array to fetch into a segment: key, array, segment, index of its first value in the segment, and the indices of the
# elements to keep (None for a one-element array). A plain tuple, because each metric of each step creates one.
_Transfer = tuple[str, Any, _Segment, int, Sequence[int] | None]


class PendingScalars:
    """Buffer scalars on the host and on the device, in the order in which they are added.

    Attributes:
      size: number of values added since the last `fetch`.
    """

    def __init__(self) -> None:
        self.size = 0
        self._segments: dict[str, list[_Segment]] = {}
        self._last_segment: dict[str, _Segment] = {}
        self._transfers: list[_Transfer] = []

    def add(self, key: str, value: Any, step: int, count: int = 1, on_device: bool = False) -> None:
        """Append a number, or a one-element device array; `count` is its number of samples."""
        segment = self._last_segment.get(key)
        if segment is None or segment.count != count:
            segment = self._get_segment(key, count)
        if on_device:
            self._transfers.append((key, value, segment, len(segment.values), None))
        segment.values.append(value)
        segment.steps.append(step)
        self.size += 1

    def add_batch(self, key: str, values: Any, first_step: int, reported: np.ndarray | None) -> None:
        """Append an array real[K] with one value per step; `reported`, bool[K], selects the values to keep."""
        segment = self._get_segment(key, 1)
        num_steps = values.shape[0]
        indices: Sequence[int] = range(num_steps) if reported is None else np.flatnonzero(reported).tolist()
        self._transfers.append((key, values, segment, len(segment.values), indices))
        segment.values += [None] * len(indices)
        segment.steps += [first_step + i for i in indices]
        self.size += len(indices)

    def fetch(self) -> bool:
        """Transfer all device arrays to the host at once, waiting until they are computed.

        Returns:
          True if there were arrays to transfer.

        Raises:
          RuntimeError: the device failed, or an array was donated. All pending values are dropped.
        """
        transfers, self._transfers, self.size = self._transfers, [], 0
        try:
            fetched = fetch_arrays([transfer[1] for transfer in transfers])
        except RuntimeError as error:
            self._segments, self._last_segment = {}, {}
            deleted = {key for key, array, *_ in transfers if isinstance(array, jax.Array) and array.is_deleted()}
            if deleted:
                error.add_note(f"{sorted(deleted)} were logged from donated arrays: log outputs of the step instead")
            raise
        for (_, _, segment, start, indices), array in zip(transfers, fetched, strict=True):
            if indices is None:
                segment.values[start] = array.item()
            else:
                selected = array if isinstance(indices, range) else array[indices]
                segment.values[start : start + len(indices)] = selected.tolist()
        return bool(transfers)

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
            self._segments, self._last_segment = {}, {}

    def _get_segment(self, key: str, count: int) -> _Segment:
        """Return the last segment of the key, or a new one if its sample count differs."""
        segments = self._segments.setdefault(key, [])
        if not segments or segments[-1].count != count:
            segments.append(_Segment(count))
        self._last_segment[key] = segments[-1]
        return segments[-1]


def fetch_arrays(arrays: list[Any]) -> list[np.ndarray]:
    """Return the arrays on the host: with one `jax.device_get`, or without a copy if they are on the CPU."""
    on_cpu = all(isinstance(array, np.ndarray) or _is_on_cpu(array) for array in arrays[:1])
    return [np.asarray(array) for array in arrays] if on_cpu else jax.device_get(arrays)


def _is_on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"
