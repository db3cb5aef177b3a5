"""Record the history of one logged scalar: the newest values in a ring, and totals over all of them."""

import math
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from jengine.errors import UnknownNameError, closest

Statistic = TypeVar("Statistic", bound=Callable[..., Any])

_FIRST_SIZE = 64  # most histories are short (metrics); the ring doubles up to its capacity
_SAVED_VALUES = 256  # of each history in a checkpoint: enough for the windows of log lines


class HistoryBuffer:
    """Keep the values of one scalar in a bounded ring.

    An update costs the same however long the run is. The ring holds the newest `capacity` values; the sum, count,
    maximum and minimum of *all* values are kept too, so that a statistic over everything stays exact when older
    values have left the ring.

    Args:
      capacity: number of values to keep, at least 1.

    Raises:
      ValueError: `capacity` below 1.
    """

    _statistics: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"the capacity of a history must be at least 1, got {capacity}")
        self._capacity = capacity
        self._clear()

    def _clear(self) -> None:
        self._values = np.empty(min(self._capacity, _FIRST_SIZE), np.float64)
        self._counts: np.ndarray | None = None  # while each value stands for one sample
        self._kept = 0
        self._next = 0
        self._updates = 0
        self._sum = 0.0
        self._count = 0
        self._max = -math.inf
        self._min = math.inf

    @classmethod
    def register_statistics(cls, method: Statistic) -> Statistic:
        """Decorate `method(buffer, ...)` to make it callable by its name through `statistics`."""
        cls._statistics[method.__name__] = method
        return method

    def update(self, value: float, count: int = 1) -> None:
        """Append a value.

        Args:
          value: the logged number; for `count` > 1 the sum over that many samples.
          count: number of samples in `value`.

        Raises:
          TypeError: `value` is not a real number. ValueError: more than one element, or `count` below 1.
        """
        self.push(to_float(value), check_count(count))

    def push(self, value: float, count: int) -> None:
        """Append a value without the checks of `update`, for callers that have made them."""
        self.extend((value,), count)

    def extend(self, values: Sequence[float], count: int = 1) -> None:
        """Append several values, each the sum over `count` samples, without checks."""
        number = len(values)
        if count != 1 and self._counts is None:
            self._counts = np.ones_like(self._values)
        end = self._next + number
        if end <= len(self._values):
            self._place(values, count, end)
        else:
            start = 0
            while start < number:
                if self._next == len(self._values):
                    self._grow_or_wrap()
                end = min(self._next + number - start, len(self._values))
                stop = start + end - self._next
                self._place(values[start:stop], count, end)
                start = stop
        self._updates += number
        self._count += number * count
        total = self._sum
        for value in values:
            total += value
        self._sum = total
        if number and total == total:
            self._max, self._min = max(self._max, *values), min(self._min, *values)
        else:
            for value in values:
                # `value != value` lets a NaN through, and comparisons with it are false, so that it stays: as in np.max
                if value > self._max or value != value:
                    self._max = value
                if value < self._min or value != value:
                    self._min = value

    def _place(self, values: Sequence[float], count: int, end: int) -> None:
        """Write values at the next positions, up to `end`."""
        self._values[self._next : end] = values
        if self._counts is not None:
            self._counts[self._next : end] = count
        self._next = end
        if end > self._kept:
            self._kept = end

    @property
    def updates(self) -> int:
        """The number of values since the start, those that left the ring included."""
        return self._updates

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """The values and counts in the ring, oldest first: two float64[n] copies."""
        part = self._latest(self._kept)
        return self._values[part].copy(), self._samples(part).copy()

    def mean(self, window_size: int | None = None) -> float:
        """Return the sum of the newest `window_size` values over the sum of their counts.

        Args:
          window_size: number of values; None, or as many as there ever were, takes all of them exactly. In between,
            a window longer than the ring takes what the ring holds.

        Raises:
          ValueError: nothing was logged yet, or a window below 1. TypeError: a window that is not an int.
        """
        if self._takes_all(window_size):
            return self._sum / self._count
        part = self._latest(window_size)
        values = self._values[part]
        samples = len(values) if self._counts is None else np.add.reduce(self._counts[part])
        return float(np.add.reduce(values) / samples)

    def max(self, window_size: int | None = None) -> float:
        """Return the largest of the newest `window_size` values; window and errors as in `mean`."""
        return self._max if self._takes_all(window_size) else float(self._values[self._latest(window_size)].max())

    def min(self, window_size: int | None = None) -> float:
        """Return the smallest of the newest `window_size` values; window and errors as in `mean`."""
        return self._min if self._takes_all(window_size) else float(self._values[self._latest(window_size)].min())

    def current(self, window_size: int | None = None) -> float:
        """Return the newest value, which is the same in any window.

        Raises:
          ValueError: nothing was logged yet.
        """
        self._takes_all(window_size)
        return float(self._values[self._next - 1])

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the statistic `method_name` with the further arguments; names and errors as in `statistic`."""
        return self.statistic(method_name)(*args, **kwargs)

    def statistic(self, method_name: str) -> Callable[..., Any]:
        """Return the statistic `method_name` of this history: 'mean', 'max', 'min', 'current' or a registered one.

        Raises:
          KeyError: no statistic has that name.
        """
        if method_name not in self._statistics:
            raise UnknownNameError(
                f"no statistic is called {method_name!r}{closest(method_name, self._statistics)} "
                "(HistoryBuffer.register_statistics adds one)"
            )
        return types.MethodType(self._statistics[method_name], self)

    def state_dict(self) -> dict[str, Any]:
        """Return the newest 256 values at most, and the totals over all: a bounded dict that JSON can hold."""
        part = self._latest(min(self._kept, _SAVED_VALUES))
        return {
            "values": self._values[part].tolist(),
            "counts": self._samples(part).astype(np.int64).tolist(),
            "updates": self._updates,
            "sum": self._sum,
            "count": self._count,
            "max": self._max,
            "min": self._min,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the history by the one that `state_dict` returned."""
        self._clear()
        for value, count in zip(state["values"], state["counts"], strict=True):
            self.push(float(value), int(count))
        self._updates = int(state["updates"])
        self._sum, self._count = float(state["sum"]), int(state["count"])
        self._max, self._min = float(state["max"]), float(state["min"])

    def __len__(self) -> int:
        return self._kept

    def __repr__(self) -> str:
        return f"HistoryBuffer({self._updates} values, the newest {self._kept} kept)"

    def _grow_or_wrap(self) -> None:
        size = len(self._values)
        if size == self._capacity:
            self._next = 0
            return
        larger = min(self._capacity, 2 * size)
        self._values = np.resize(self._values, larger)
        if self._counts is not None:
            self._counts = np.resize(self._counts, larger)

    def _takes_all(self, window_size: int | None) -> bool:
        if not self._updates:
            raise ValueError("the history is empty: nothing was logged under this key yet")
        if window_size is None:
            return True
        if isinstance(window_size, bool) or not isinstance(window_size, int):
            raise TypeError(f"a window must be a number of values (an int) or None, got {window_size!r}")
        if window_size < 1:
            raise ValueError(f"a window must be at least 1 value, got {window_size}")
        return window_size >= self._updates

    def _latest(self, window_size: int | None) -> slice | np.ndarray:
        """Return the indices of the newest values, in order: min(window_size, number kept) of them."""
        number = self._kept if window_size is None else min(window_size, self._kept)
        if number <= self._next:
            return slice(self._next - number, self._next)
        return np.arange(self._next - number, self._next)  # negative indices count from the ring's end: older values

    def _samples(self, part: slice | np.ndarray) -> np.ndarray:
        """Return the number of samples in each of these values, float64[n]."""
        counts: np.ndarray = np.ones_like(self._values[part]) if self._counts is None else self._counts[part]
        return counts


for _method in (HistoryBuffer.mean, HistoryBuffer.max, HistoryBuffer.min, HistoryBuffer.current):
    HistoryBuffer.register_statistics(_method)


def to_float(value: Any) -> float:
    """Convert a Python number, numpy number or array of one element to a Python float.

    Raises:
      TypeError: not a real number. ValueError: an array of more or less than one element.
    """
    size = getattr(value, "size", 1)
    if size != 1:
        raise ValueError(f"a logged scalar must have one element, got {size} (shape {tuple(value.shape)})")
    if isinstance(value, str | bytes) or value is None:
        raise TypeError(f"a logged scalar must be a number, got {type(value).__name__}: {value!r}")
    try:
        return float(value.item() if hasattr(value, "item") else value)
    except TypeError as error:
        raise TypeError(f"a logged scalar must be a real number, got {type(value).__name__}: {value!r}") from error


def check_count(count: Any) -> int:
    """Return `count` if it is an int of at least 1.

    Raises:
      TypeError: not an int. ValueError: below 1.
    """
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(f"the count of a logged scalar must be an int, got {count!r}")
    if count < 1:
        raise ValueError(f"the count of a logged scalar must be at least 1, got {count}")
    return int(count)
