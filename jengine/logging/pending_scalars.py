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
      rows: scalars to fetch: (key, value, step, number of samples) with a number or a one-element array; or (key,
        values, first step, indices) with one value per step and the indices to keep. Callers append to it directly,
        as every step has several scalars.
      size: number of values in `rows`, counted by the callers.
    """

    def __init__(self) -> None:
        self.rows: list[tuple[str, Any, int, int | Sequence[int]]] = []
        self.size = 0
        self._segments: dict[str, list[Segment]] = {}  # consecutive values with the same number of samples

    def fetch(self) -> bool:
        """Transfer all device arrays to the host at once and wait until they are computed.

        Returns:
          True if there were arrays to transfer.
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
        for key, value, step, samples in rows:
            count = samples if isinstance(samples, int) else 1
            segments = self._segments.get(key) or self._segments.setdefault(key, [])
            if not segments or segments[-1][0] != count:  # e.g. a last, smaller batch
                segments.append((count, [], []))
            _, steps, values = segments[-1]
            if isinstance(samples, int):
                values.append(value if type(value) is float else next(fetched).item())
                steps.append(step)
            else:
                values += next(fetched)[list(samples)].tolist()
                steps += [step + i for i in samples]
        return bool(arrays)

    def take(self, step: float) -> Iterator[tuple[str, list[int], list[float], int]]:
        """Remove the fetched values up to and including `step`.

        Yields:
          The key, the steps, the values in order, and the number of samples in each.
        """
        taken, self._segments = self._segments, {}  # segments may end after `step`: their rest is kept
        for key, segments in taken.items():
            for count, steps, values in segments:
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
