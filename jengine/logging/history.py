"""History of one logged scalar: the newest values in a ring buffer, and totals over all values."""

import collections
import math
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from jengine.errors import UnknownNameError, closest

Statistic = TypeVar("Statistic", bound=Callable[..., Any])
Number = TypeVar("Number", int, float)

_NUM_SAVED_VALUES = 256  # per history in a checkpoint: enough for the windows of log lines


class HistoryBuffer:
    """Ring buffer with the newest `capacity` values of one scalar, at least 1.

    An update costs the same at any run length. Sum, count, maximum and minimum cover *all* values, so that statistics
    over the whole run are exact.

    Examples:
      >>> losses = HistoryBuffer(capacity=2)
      >>> losses.extend([8.0, 4.0, 2.0])
      >>> losses.mean(2), losses.mean(), losses.max()
      (3.0, 4.666666666666667, 8.0)
    """

    _statistics: ClassVar[dict[str, Callable[..., Any]]] = {}

    def __init__(self, capacity: int = 10_000) -> None:
        if capacity < 1:
            raise ValueError(f"`capacity` must be at least 1, got {capacity}")
        self._capacity = capacity
        self._clear()

    def _clear(self) -> None:
        self._values: collections.deque[float] = collections.deque(maxlen=self._capacity)
        self._counts: collections.deque[int] | None = None  # None as long as all counts are 1
        self._updates = 0
        self._sum = 0.0
        self._count = 0
        self._max = -math.inf
        self._min = math.inf

    @classmethod
    def register_statistics(cls, method: Statistic) -> Statistic:
        """Register `method(buffer, ...)`, as a decorator, so that `statistics` can call it by name."""
        cls._statistics[method.__name__] = method
        return method

    def update(self, value: float, count: int = 1) -> None:
        """Append a value: a number, or the sum over `count` samples.

        Raises:
          TypeError: `value` is not a real number. ValueError: `value` has several elements, or `count` is below 1.
        """
        self.extend((to_float(value),), check_count(count))

    def extend(self, values: Sequence[float], count: int = 1) -> None:
        """Append several values that are already checked, each the sum over `count` samples."""
        num_values = len(values)
        if count != 1 and self._counts is None:  # the first value with several samples
            self._counts = collections.deque([1] * len(self._values), self._capacity)
        self._values.extend(map(float, values))  # integer metrics are shown as floats too
        if self._counts is not None:
            self._counts.extend([count] * num_values)
        self._updates += num_values
        self._count += num_values * count
        total = self._sum
        for value in values:
            total += value
        self._sum = total
        if num_values and total == total:  # not NaN
            self._max, self._min = max(self._max, *values), min(self._min, *values)
        else:
            for value in values:
                # a NaN replaces the extremum and stays there, as in np.max: comparisons with it are false
                if value > self._max or value != value:
                    self._max = value
                if value < self._min or value != value:
                    self._min = value

    @property
    def updates(self) -> int:
        """The number of updates in total, including values no longer in the ring."""
        return self._updates

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the values and counts in the ring, oldest first, float64[n] each."""
        counts = [1] * len(self) if self._counts is None else self._counts
        return np.array(self._values, np.float64), np.array(counts, np.float64)

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean of the newest `window_size` values, weighted by sample counts.

        Without a window, or if it covers all updates, the mean is exact; other windows are cut to the ring.

        Raises:
          ValueError: the history is empty, or `window_size` is below 1. TypeError: `window_size` is not an int.
        """
        if self._covers_all(window_size):
            return self._sum / self._count
        values = _newest(self._values, window_size)
        samples = len(values) if self._counts is None else sum(_newest(self._counts, window_size))
        return float(np.add.reduce(values)) / samples

    def max(self, window_size: int | None = None) -> float:
        """Return the largest of the newest `window_size` values; arguments and errors as in `mean`."""
        return self._max if self._covers_all(window_size) else float(np.max(_newest(self._values, window_size)))

    def min(self, window_size: int | None = None) -> float:
        """Return the smallest of the newest `window_size` values; arguments and errors as in `mean`."""
        return self._min if self._covers_all(window_size) else float(np.min(_newest(self._values, window_size)))

    def current(self, window_size: int | None = None) -> float:
        """Return the newest value, for any window; ValueError if the history is empty."""
        self._covers_all(window_size)
        return self._values[-1]

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the statistic `method_name` with the other arguments; names and errors as in `statistic`."""
        return self.statistic(method_name)(*args, **kwargs)

    def statistic(self, method_name: str) -> Callable[..., Any]:
        """Return the bound statistic `method_name`: 'mean', 'max', 'min', 'current' or a registered one."""
        if method_name not in self._statistics:
            raise UnknownNameError(
                f"no statistic is called {method_name!r}{closest(method_name, self._statistics)} "
                "(HistoryBuffer.register_statistics adds one)"
            )
        return types.MethodType(self._statistics[method_name], self)

    def state_dict(self) -> dict[str, Any]:
        """Return at most the newest 256 values, and the totals over all values, as a JSON-serializable dict."""
        values = _newest(self._values, _NUM_SAVED_VALUES)
        return {
            "values": values,
            "counts": [1] * len(values) if self._counts is None else _newest(self._counts, _NUM_SAVED_VALUES),
            "updates": self._updates,
            "sum": self._sum,
            "count": self._count,
            "max": self._max,
            "min": self._min,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the history with a result of `state_dict`."""
        self._clear()
        for value, count in zip(state["values"], state["counts"], strict=True):
            self.extend((float(value),), int(count))
        self._updates = int(state["updates"])
        self._sum, self._count = float(state["sum"]), int(state["count"])
        self._max, self._min = float(state["max"]), float(state["min"])

    def __len__(self) -> int:
        return len(self._values)

    def __repr__(self) -> str:
        return f"HistoryBuffer({self._updates} values, the newest {len(self)} kept)"

    def _covers_all(self, window_size: int | None) -> bool:
        if not self._updates:
            raise ValueError("the history is empty: nothing has been logged under this key")
        if window_size is None:
            return True
        if isinstance(window_size, bool) or not isinstance(window_size, int):
            raise TypeError(f"`window_size` must be an int (number of values) or None, got {window_size!r}")
        if window_size < 1:
            raise ValueError(f"`window_size` must be at least 1, got {window_size}")
        return window_size >= self._updates


def _newest(values: "collections.deque[Number]", size: int | None) -> "list[Number]":
    """Return the newest `size` entries, oldest first; at most all that are kept."""
    if size is None or size >= len(values):
        return list(values)
    return [values[i] for i in range(-size, 0)]  # near the end, a deque is as fast as a list


for _method in (HistoryBuffer.mean, HistoryBuffer.max, HistoryBuffer.min, HistoryBuffer.current):
    HistoryBuffer.register_statistics(_method)


def to_float(value: Any) -> float:
    """Convert a Python number, NumPy number or one-element array to a Python float."""
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
    """Return `count` as a Python int; TypeError if it is not an int, ValueError if it is below 1."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(f"`count` of a logged scalar must be an int, got {count!r}")
    if count < 1:
        raise ValueError(f"`count` of a logged scalar must be at least 1, got {count}")
    return int(count)
