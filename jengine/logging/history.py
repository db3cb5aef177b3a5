"""History of one logged scalar: the newest values, and totals over all values."""

import array
import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar

import numpy as np

from jengine.errors import UnknownNameError, closest

Statistic = TypeVar("Statistic", bound=Callable[..., Any])

_NUM_SAVED_VALUES = 256  # per history in a checkpoint: enough for the windows of log lines


class HistoryBuffer:
    """Buffer with the newest `capacity` values of one scalar, at least 1.

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
        # 8 bytes a value, where a list or a deque of floats has 32; with a few that are older than the capacity.
        self._values = array.array("d")
        self._counts: array.array[int] | None = None  # None as long as all counts are 1
        self._updates = 0
        self._sum = 0.0
        self._count = 0
        self._max = -math.inf
        self._min = math.inf
        self._folded = 0  # how many of the values the sum and the extrema have

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
        self.extend([to_float(value)], check_count(count))

    def extend(self, values: list[float], count: int = 1) -> None:
        """Append several values that are already checked, each the sum over `count` samples."""
        if not values:
            return
        if count != 1 and self._counts is None:  # the first value with several samples
            self._counts = array.array("q", [1]) * len(self._values)
        self._values.fromlist(values)
        if self._counts is not None:
            self._counts.extend([count] * len(values))
        if len(self._values) > 1.125 * self._capacity:  # seldom, as it moves all values
            self._fold()
            del self._values[: -self._capacity]
            self._folded = len(self._values)
            if self._counts is not None:
                del self._counts[: -self._capacity]
        self._updates += len(values)
        self._count += len(values) * count

    def _fold(self) -> None:
        """Bring the totals up to date: with the values since the last call, as few log lines need them."""
        values, self._folded = self._values[self._folded :], len(self._values)
        # One by one: `sum` compensates, so the total would depend on how many values come together.
        self._sum = functools.reduce(operator.add, values, self._sum)
        # NumPy's: a NaN replaces the extremum and stays there; for Python's `max` it depends on the order.
        self._max, self._min = float(np.max([*values, self._max])), float(np.min([*values, self._min]))

    @property
    def updates(self) -> int:
        """The number of updates in total, including values that are no longer kept."""
        return self._updates

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the values and counts that are kept, oldest first, float64[n] each."""
        return np.array(self._newest()), np.array(self._newest_counts(), np.float64)

    def mean(self, window_size: int | None = None) -> float:
        """Return the mean of the newest `window_size` values, weighted by sample counts.

        Without a window, or if it covers all updates, the mean is exact; other windows are cut to the values kept.

        Raises:
          ValueError: the history is empty, or `window_size` is below 1. TypeError: `window_size` is not an int.
        """
        if self._covers_all(window_size):
            self._fold()
            return self._sum / self._count
        values = self._newest(window_size)
        return math.fsum(values) / (len(values) if self._counts is None else sum(self._newest_counts(window_size)))

    def max(self, window_size: int | None = None) -> float:
        """Return the largest of the newest `window_size` values; arguments and errors as in `mean`."""
        if not self._covers_all(window_size):
            return float(np.max(self._newest(window_size)))
        self._fold()
        return self._max

    def min(self, window_size: int | None = None) -> float:
        """Return the smallest of the newest `window_size` values; arguments and errors as in `mean`."""
        if not self._covers_all(window_size):
            return float(np.min(self._newest(window_size)))
        self._fold()
        return self._min

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
        self._fold()
        return {
            # A bounded number, so that checkpoints of long runs stay small; the totals below are over all values.
            "values": self._newest(_NUM_SAVED_VALUES).tolist(),
            "counts": list(self._newest_counts(_NUM_SAVED_VALUES)),
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
            self.extend([float(value)], int(count))
        # After the values, whose `extend` has counted them only.
        self._folded, self._updates = len(self._values), int(state["updates"])
        self._sum, self._count = float(state["sum"]), int(state["count"])
        self._max, self._min = float(state["max"]), float(state["min"])

    def __len__(self) -> int:
        return min(len(self._values), self._capacity)

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

    def _newest(self, size: int | None = None) -> "array.array[float]":
        """Return the newest `size` values, oldest first; at most all that are kept."""
        kept = min(len(self._values), self._capacity)
        return self._values[-min(size or kept, kept) :]

    def _newest_counts(self, size: int | None = None) -> Sequence[int]:
        size = min(size or len(self), len(self))
        return [1] * size if self._counts is None else self._counts[-size:]


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


def check_count(count: int) -> int:
    """Return `count` as a Python int; TypeError if it is not an int, ValueError if it is below 1."""
    if isinstance(count, bool) or not isinstance(count, int | np.integer):
        raise TypeError(f"`count` of a logged scalar must be an int, got {count!r}")
    if count < 1:
        raise ValueError(f"`count` of a logged scalar must be at least 1, got {count}")
    return int(count)
