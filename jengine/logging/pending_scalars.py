"""Buffer scalars until a read, so that the training loop never waits for the device."""

import bisect
import math
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np


class _Column:
    """Hold values of one scalar, of equally many samples each, with their steps."""

    __slots__ = ("samples", "steps", "taken", "values")

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.steps: list[int] = []
        self.values: list[Any] = []
        self.taken = 0

    def take(self, step: float) -> list[float]:
        """Remove and return the values up to and including `step`."""
        start, self.taken = self.taken, bisect.bisect_right(self.steps, step, self.taken)
        return self.values[start : self.taken]


# A device array whose elements belong to a column: key, array, column, index of its first value there, and the elements
# that count (None for an array of one element). A plain tuple, since one is made for each metric of a step.
_Transfer = tuple[str, Any, _Column, int, Sequence[int] | None]


class PendingScalars:
    """Buffer scalars, on the host and on the device, in the order in which they were added.

    Attributes:
      size: number of values that were added and not fetched.
    """

    def __init__(self) -> None:
        self.size = 0
        self._columns: dict[str, list[_Column]] = {}
        self._newest: dict[str, _Column] = {}
        self._transfers: list[_Transfer] = []

    def add(self, key: str, value: Any, step: int, samples: int = 1, on_device: bool = False) -> None:
        """Append a number, or a device array of one element."""
        column = self._newest.get(key)
        if column is None or column.samples != samples:
            column = self._column(key, samples)
        if on_device:
            self._transfers.append((key, value, column, len(column.values), None))
        column.values.append(value)
        column.steps.append(step)
        self.size += 1

    def add_batch(self, key: str, values: Any, first_step: int, reported: np.ndarray | None) -> None:
        """Append an array real[K] with a value for each step; `reported`: bool[K], which of them count."""
        column = self._column(key, 1)
        count = values.shape[0]
        rows: Sequence[int] = range(count) if reported is None else np.flatnonzero(reported).tolist()
        self._transfers.append((key, values, column, len(column.values), rows))
        column.values += [None] * len(rows)
        column.steps += range(first_step, first_step + count) if reported is None else [first_step + i for i in rows]
        self.size += len(rows)

    def fetch(self) -> bool:
        """Transfer all device arrays to the host at once; wait for those that are not computed yet.

        Returns:
          True if there were device arrays.

        Raises:
          RuntimeError: the device failed, or an array was donated. All pending values are dropped.
        """
        transfers, self._transfers, self.size = self._transfers, [], 0
        try:
            fetched = fetch_arrays([transfer[1] for transfer in transfers])
        except RuntimeError as error:
            self._columns, self._newest = {}, {}
            deleted = {key for key, array, *_ in transfers if isinstance(array, jax.Array) and array.is_deleted()}
            if deleted:
                error.add_note(f"{sorted(deleted)} were logged from donated arrays: log what the step returns instead")
            raise
        for (_, _, column, start, rows), array in zip(transfers, fetched, strict=True):
            if rows is None:
                column.values[start] = array.item()
            else:
                chosen = array if isinstance(rows, range) else array[rows]
                column.values[start : start + len(rows)] = chosen.tolist()
        return bool(transfers)

    def take(self, step: float) -> Iterator[tuple[str, list[float], int]]:
        """Remove what was fetched up to and including `step`.

        Yields:
          The scalar, values of it in order, and the number of samples in each of them.
        """
        for key, columns in self._columns.items():
            for column in columns:
                if values := column.take(step):
                    yield key, values, column.samples
        if step == math.inf:
            self._columns, self._newest = {}, {}

    def _column(self, key: str, samples: int) -> _Column:
        columns = self._columns.setdefault(key, [])
        if not columns or columns[-1].samples != samples:
            columns.append(_Column(samples))
        self._newest[key] = columns[-1]
        return columns[-1]


def fetch_arrays(arrays: list[Any]) -> list[np.ndarray]:
    """Return the arrays on the host, with one `jax.device_get`, or read in place where their memory is the host's."""
    on_cpu = all(isinstance(array, np.ndarray) or _is_on_cpu(array) for array in arrays[:1])
    return [np.asarray(array) for array in arrays] if on_cpu else jax.device_get(arrays)


def _is_on_cpu(array: jax.Array) -> bool:
    return next(iter(array.devices())).platform == "cpu"
