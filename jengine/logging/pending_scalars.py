"""Buffer for scalars that nobody has read yet, so that the training loop never waits for the
device.
"""

import bisect
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import numpy as np

# Number of samples per value, steps, values; before they are fetched, also indices to keep instead
# of the number, the first step, and an array with one value for each step
_Part = tuple[int | Sequence[int], list[int], list[Any]]


class PendingScalars:
    """Scalars on the host and on the device, in the order in which they were added.

    Attributes:
      columns: steps and values by key, of scalars with one sample each: numbers or one-element
        arrays. Callers append to them directly, as every step has several scalars; `start_column`
        adds one.
      size: number of values to fetch, counted by the callers.
    """

    def __init__(self) -> None:
        self.columns: dict[str, tuple[list[int], list[Any]]] = {}
        self.size = 0
        self._earlier: dict[str, list[_Part]] = {}  # what precedes each column, in order

    def start_column(self, key: str) -> tuple[list[int], list[Any]]:
        """Return the new, empty column of a key."""
        self._earlier.setdefault(key, [])  # keeps the order of the keys
        self.columns[key] = [], []
        return self.columns[key]

    def add(self, key: str, value: Any, step: int, samples: int | Sequence[int]) -> None:
        """Add a sum over several samples, or the values at `samples`, indices of an array that
        starts at `step`.
        """
        earlier = self._earlier.setdefault(key, [])
        if (column := self.columns.pop(key, None)) is not None:
            earlier.append((1, *column))
        if samples:  # no index: no iteration of the chunk reports the value
            earlier.append((samples, [step], [value]))

    def fetch(self) -> bool:
        """Transfer all device arrays to the host at once and wait until they are computed.

        Returns:
          True if there were arrays to transfer.
        """
        for key, column in self.columns.items():
            self._earlier[key].append((1, *column))
        earlier = self._earlier
        self.columns = {}
        self.size = 0
        arrays = [
            x
            for parts in earlier.values()
            for _, _, values in parts
            for x in values
            if type(x) is not float
        ]
        try:
            fetched = iter(fetch_arrays(arrays))
            for parts in earlier.values():
                for i, (samples, steps, values) in enumerate(parts):
                    if isinstance(samples, int):
                        values[:] = [
                            x if type(x) is float else next(fetched).item() for x in values
                        ]
                    else:
                        kept = next(fetched)[list(samples)].tolist()
                        parts[i] = 1, [steps[0] + offset for offset in samples], kept
        except RuntimeError as error:
            self._earlier = {}
            deleted = {
                key
                for key, parts in earlier.items()
                if any(
                    isinstance(x, jax.Array) and x.is_deleted()
                    for _, _, values in parts
                    for x in values
                )
            }
            if deleted:
                error.add_note(
                    f"{sorted(deleted)} were logged from donated arrays: log outputs of the step "
                    "instead"
                )
            raise
        return bool(arrays)

    def take(self, step: float) -> Iterator[tuple[str, list[int], list[float], int]]:
        """Remove the fetched values up to and including `step`.

        Yields:
          The key, the steps, the values in order, and the number of samples in each.
        """
        for key, parts in self._earlier.items():
            while parts and parts[0][1][0] <= step:
                count, steps, values = parts.pop(0)
                # Steps are in order, as scalars are added by the loop; the rest is for a later line
                # of the same chunk.
                end = bisect.bisect_right(steps, step)
                if end < len(steps):
                    parts.insert(0, (count, steps[end:], values[end:]))
                    steps = steps[:end]
                    values = values[:end]
                assert isinstance(count, int)  # since `fetch`
                yield key, steps, values, count


def fetch_arrays(arrays: list[Any]) -> Iterable[np.ndarray]:
    """Return the arrays on the host: with one `jax.device_get`, or one by one without a copy if
    they are on the CPU.
    """
    # device_get makes Python calls for each array, which cost more than the copy of a scalar
    on_cpu = all(isinstance(x, np.ndarray) or _is_on_cpu(x.sharding) for x in arrays[:1])
    return map(np.asarray, arrays) if on_cpu else jax.device_get(arrays)


# one sharding for all metrics of a run, and its set of devices is built at each call
@functools.lru_cache(maxsize=16)
def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    device: jax.Device = next(iter(sharding.device_set))
    return device.platform == "cpu"
