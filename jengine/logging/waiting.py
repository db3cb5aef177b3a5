"""Values of scalars that are not in their histories yet, since they are still being made on a device."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple, cast

import jax
import numpy as np

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

    def split(self, iteration: int) -> tuple["Waiting | None", "Waiting | None"]:
        """What was given up to and with `iteration`, and what came later."""
        if type(self.value) is not Series:
            return (self, None) if self.iteration <= iteration else (None, self)
        values, rows = self.value
        ends = bisect.bisect_right(rows, iteration - self.iteration)
        if ends in (0, len(rows)):
            return (self, None) if ends else (None, self)
        now, later = Series(values, rows[:ends]), Series(values, rows[ends:])
        return (
            Waiting(self.key, now, self.samples, self.iteration),
            Waiting(self.key, later, self.samples, self.iteration),
        )
