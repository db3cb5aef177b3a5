"""Buffer for scalars that nobody has read yet, so that the training loop never waits for the device."""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

Segment = tuple[int, list[int], list[float]]  # number of samples per value, steps, values


class PendingScalars:
    """Scalars on the host and on the device, in the order in which they were added.

    Attributes:
      columns: steps and values by key, of scalars with one sample each: numbers or one-element arrays. Callers append
        to them directly, as every step has several scalars; `start_column` adds one.
      size: number of values to fetch, counted by the callers.
    """

    def __init__(self) -> None:
        self.columns: dict[str, tuple[list[int], list[Any]]] = {}
        self.size = 0
        # The earlier rest of each column: (number of samples per value, steps, values); or with the indices to keep
        # instead of the number, and an array with one value for each step
        self._earlier: dict[str, list[tuple[int | Sequence[int], list[int], list[Any]]]] = {}
        self._segments: dict[str, list[Segment]] = {}  # consecutive fetched values with the same number of samples

    def start_column(self, key: str) -> tuple[list[int], list[Any]]:
        """Return the new, empty column of a key."""
        self._earlier.setdefault(key, [])  # keeps the order of the keys
        self.columns[key] = [], []
        return self.columns[key]

    def add(self, key: str, value: Any, step: int, samples: int | Sequence[int]) -> None:
        """Add a sum over several samples, or the values at `samples`, indices of an array that starts at `step`."""
        earlier = self._earlier.setdefault(key, [])
        if (column := self.columns.pop(key, None)) is not None:
            earlier.append((1, *column))
        earlier.append((samples, [step], [value]))

    def fetch(self) -> bool:
        """Transfer all device arrays to the host at once and wait until they are computed.

        Returns:
          True if there were arrays to transfer.
        """
        earlier, columns = self._earlier, self.columns
        self._earlier, self.columns, self.size = {}, {}, 0
        for key, column in columns.items():
            earlier[key].append((1, *column))
        arrays = [x for parts in earlier.values() for _, _, values in parts for x in values if type(x) is not float]
        try:
            fetched = iter(fetch_arrays(arrays))
        except RuntimeError as error:
            self._segments = {}
            deleted = {
                key
                for key, parts in earlier.items()
                if any(isinstance(x, jax.Array) and x.is_deleted() for _, _, values in parts for x in values)
            }
            if deleted:
                error.add_note(f"{sorted(deleted)} were logged from donated arrays: log outputs of the step instead")
            raise
        for key, parts in earlier.items():
            segments = self._segments.setdefault(key, [])
            for samples, steps, values in parts:
                if isinstance(samples, int):
                    segment = samples, steps, [x if type(x) is float else next(fetched).item() for x in values]
                else:
                    segment = 1, [steps[0] + i for i in samples], next(fetched)[list(samples)].tolist()
                if segments and segments[-1][0] == segment[0]:
                    segments[-1][1].extend(segment[1])
                    segments[-1][2].extend(segment[2])
                else:  # the first, or e.g. a last, smaller batch
                    segments.append(segment)
        return bool(arrays)

    def take(self, step: float) -> Iterator[tuple[str, list[int], list[float], int]]:
        """Remove the fetched values up to and including `step`.

        Yields:
          The key, the steps, the values in order, and the number of samples in each.
        """
        taken, self._segments = self._segments, {}  # segments may end after `step`: their rest is kept
        for key, segments in taken.items():
            for count, steps, values in segments:
                # Steps are in order, as scalars are added by the loop.
                end = len(steps) if step == math.inf else bisect.bisect_right(steps, step)
                if end < len(steps):
                    self._segments.setdefault(key, []).append((count, steps[end:], values[end:]))
                if end:
                    yield key, steps[:end], values[:end], count


def fetch_arrays(arrays: list[Any]) -> list[np.ndarray]:
    """Return the arrays on the host: with one `jax.device_get`, or without a copy if they are on the CPU."""
    # device_get makes Python calls for each array, which cost more than the copy of a scalar
    on_cpu = all(isinstance(x, np.ndarray) or next(iter(x.devices())).platform == "cpu" for x in arrays[:1])
    return [np.asarray(array) for array in arrays] if on_cpu else jax.device_get(arrays)
