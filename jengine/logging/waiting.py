"""Values of scalars that are not in their histories yet, since they are still being made on a device."""

import bisect
import collections
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from jengine.logging.fetch import fetch_arrays

HOST_NUMBERS = frozenset({float, int, bool, np.float32, np.float64})


class Series(NamedTuple):
    """Several values of one scalar, a row for each iteration: elements of one array, or arrays of one element each."""

    values: jax.Array | np.ndarray | Sequence[jax.Array]
    rows: Sequence[int]  # which count, in order

    @property
    def arrays(self) -> Sequence[jax.Array]:
        """The device arrays among the values."""
        values = self.values
        if type(values) is np.ndarray:
            return ()
        if isinstance(values, list | tuple):  # to ask for `jax.Array` takes longer
            return [values[row] for row in self.rows]
        return cast("Sequence[jax.Array]", (values,))

    def read(self, fetched: Iterator[np.ndarray]) -> list[float]:
        """The values; those of the device are the next ones of `fetched`."""
        values, rows = self.values, self.rows
        if isinstance(values, list | tuple):
            return [float(next(fetched).item()) for _ in rows]
        array = values if type(values) is np.ndarray else next(fetched)
        chosen = slice(rows.start, rows.stop) if type(rows) is range and rows.step == 1 else list(rows)
        numbers: list[float] = array[chosen].tolist()
        return numbers


class Waiting(NamedTuple):
    """One or more values of a scalar that are not in its history yet.

    Attributes:
      key: of the scalar.
      value: a number of the host, a device array of one element, or several of either in a `Series`.
      samples: how many each value stands for.
      iteration: the one that gave the value; the first of a series.
    """

    key: str
    value: Any
    samples: int
    iteration: int

    @property
    def arrays(self) -> Sequence[jax.Array]:
        """The device arrays among the values."""
        if type(self.value) in HOST_NUMBERS:
            return ()
        return self.value.arrays if type(self.value) is Series else (self.value,)

    def read(self, fetched: Iterator[np.ndarray]) -> list[float]:
        """The values; those of the device are the next ones of `fetched`."""
        if type(self.value) is Series:
            return self.value.read(fetched)
        return [float(self.value if type(self.value) in HOST_NUMBERS else next(fetched).item())]

    @property
    def iterations(self) -> Sequence[int]:
        """Which iteration gave each of the values."""
        if type(self.value) is not Series:
            return (self.iteration,)
        rows, first = self.value.rows, self.iteration
        if type(rows) is range:
            return range(first + rows.start, first + rows.stop, rows.step)
        return [first + row for row in rows]


class _Run:
    """Values of one scalar, in order, each of which stands for as many samples.

    Args:
      iterations: which gave them.
      values: the values.
      samples: how many each stands for.
    """

    __slots__ = ("iterations", "samples", "taken", "values")

    def __init__(self, iterations: Sequence[int], values: list[float], samples: int) -> None:
        self.iterations, self.values, self.samples = iterations, values, samples
        self.taken = 0

    def extend(self, iterations: Sequence[int], values: list[float]) -> None:
        """Adds later ones."""
        if not isinstance(self.iterations, list):
            self.iterations = list(self.iterations)
        self.iterations.extend(iterations)
        self.values.extend(values)


class Arrivals:
    """What has waited, on its way into the histories: it may go there iteration by iteration.

    Args:
      waiting: the values, those of each scalar in the order of their iterations.
    """

    def __init__(self, waiting: Sequence[Waiting]) -> None:
        self._waiting = waiting
        self._runs: dict[str, collections.deque[_Run]] = {}

    def until(self, iteration: float) -> Iterator[tuple[str, list[float], int]]:
        """Takes what came up to and with an iteration; the first time this waits for the device, in one transfer.

        An error of the device comes out here; all values are then dropped, so that it is told once.

        Yields:
          The scalar, values of it in order, and how many samples each of them stands for.
        """
        if self._waiting:
            self._fetch()
        for key, runs in self._runs.items():
            while runs:
                run = runs[0]
                taken, run.taken = run.taken, bisect.bisect_right(run.iterations, iteration, run.taken)
                if taken < run.taken:
                    yield key, run.values[taken : run.taken], run.samples
                if run.taken < len(run.values):
                    break
                runs.popleft()

    @property
    def arrays(self) -> list[jax.Array]:
        """The device arrays that were not fetched yet."""
        return [array for entry in self._waiting for array in entry.arrays]

    def _fetch(self) -> None:
        waiting, arrays, self._waiting = self._waiting, self.arrays, ()
        try:
            fetched = iter(fetch_arrays(arrays))
        except RuntimeError as error:
            deleted = {entry.key for entry in waiting if any(array.is_deleted() for array in entry.arrays)}
            if deleted:
                error.add_note(f"{sorted(deleted)} were logged from donated arrays: log what the step returns instead")
            raise
        for entry in waiting:
            runs, values = self._runs.setdefault(entry.key, collections.deque()), entry.read(fetched)
            if runs and runs[-1].samples == entry.samples:
                runs[-1].extend(entry.iterations, values)
            else:
                runs.append(_Run(entry.iterations, values, entry.samples))
