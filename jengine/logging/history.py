"""History of one logged scalar: the newest values, and totals over all values."""

import array
import dataclasses
import functools
import math
import operator
import types
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from jengine.config.annotations import Count
from jengine.config.errors import UnknownNameError, closest

Statistic = TypeVar("Statistic", bound=Callable[..., Any])

_NUM_SAVED_VALUES = 256  # per history in a checkpoint, unless a window is longer

Window = Count | Literal["epoch"] | None


@dataclasses.dataclass
class Totals:
    """Sum, weight and extrema of many values.

    Values that are not finite have no part in a mean, and NaN in none.

    Attributes:
      sum: sum of value * weight.
      weight: sum of sample count * weight.
      max, min: the extrema.
    """

    sum: float = 0.0
    weight: float = 0.0
    max: float = -math.inf
    min: float = math.inf

    def add(
        self,
        values: Sequence[float],
        counts: Sequence[int] | None,
        weights: Sequence[float] | None,
    ) -> None:
        """Add values with their sample counts and weights, None for 1."""
        # One by one: `sum` compensates, so the total would depend on how many values come together.
        if values and counts is None and weights is None and all(map(math.isfinite, values)):
            self.sum = functools.reduce(operator.add, values, self.sum)
            self.weight += len(values)
            self.max = max(self.max, max(values))
            self.min = min(self.min, min(values))
            return
        counts = counts or [1] * len(values)
        weights = weights or [1.0] * len(values)
        for value, count, weight in zip(values, counts, weights, strict=True):
            if weight and math.isfinite(value):
                self.sum += value * weight
                self.weight += count * weight
            if weight and not math.isnan(value):
                self.max = max(self.max, value)
                self.min = min(self.min, value)


class HistoryBuffer:
    """Buffer with the newest `capacity` values of one scalar, at least 1.

    An update costs the same at any run length. Totals cover *all* values, and all in the current
    epoch, so that statistics over the whole run and over an epoch are exact. NaN, and values with
    weight 0, do not count in means and extrema, and infinity does not count in means. Where no
    value counts, a statistic is the newest value.

    Attributes:
      epoch_start: iteration at which the current epoch started, see `start_epoch`.

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
        self._num_saved = _NUM_SAVED_VALUES
        self._clear()

    def _clear(self) -> None:
        # 8 bytes a value, where a list or a deque of floats has 32; with a few that are older than
        # the capacity.
        self._values = array.array("d")
        self._counts: array.array[int] | None = None  # None as long as all counts are 1
        self._weights: array.array[float] | None = None  # None as long as all weights are 1
        self._updates = 0
        self._all = Totals()
        self._epoch = Totals()
        self.epoch_start = 0
        self._epoch_updates = 0
        self._folded = 0  # how many of the values the totals have

    @classmethod
    def register_statistics(cls, method: Statistic) -> Statistic:
        """Register `method(buffer, ...)`, as a decorator, so that `statistics` can call it by
        name.
        """
        cls._statistics[method.__name__] = method
        return method

    def update(self, value: float, count: int = 1) -> None:
        """Append a value: a number, or the sum over `count` samples.

        Raises:
          TypeError: `value` is not a real number, or `count` not an integer. ValueError: `value`
            has several elements, or `count` is below 1.
        """
        self.extend([to_float(value)], operator.index(count))

    def extend(
        self, values: list[float], count: int = 1, weights: Sequence[float] | None = None
    ) -> None:
        """Append several values that are already checked, each the sum over `count` samples.

        `weights` are those in means, 1 by default; a value with weight 0 does not count.
        """
        if count < 1:
            raise ValueError(f"`count` of a logged scalar must be at least 1, got {count}")
        if not values:
            return
        if count != 1 and self._counts is None:  # the first value with several samples
            self._counts = array.array("q", [1]) * len(self._values)
        if weights is not None and self._weights is None:
            self._weights = array.array("d", [1.0]) * len(self._values)
        self._values.fromlist(values)
        if self._counts is not None:
            self._counts.extend([count] * len(values))
        if self._weights is not None:
            self._weights.extend([1.0] * len(values) if weights is None else weights)
        if len(self._values) > 1.125 * self._capacity:  # seldom, as it moves all values
            self._fold()
            for column in (self._values, self._counts, self._weights):
                if column is not None:
                    del column[: -self._capacity]
            self._folded = len(self._values)
        self._updates += len(values)
        self._epoch_updates += len(values)

    def start_epoch(self, iteration: int) -> None:
        """Begin the window 'epoch' with the next value."""
        self._fold()
        self.epoch_start = iteration
        self._epoch = Totals()
        self._epoch_updates = 0

    def keep(self, window_size: int) -> None:
        """Keep this many values from now on, also in checkpoints."""
        self._capacity = max(self._capacity, window_size)
        self._num_saved = max(self._num_saved, window_size)

    def _fold(self) -> None:
        """Bring the totals up to date: with the values since the last call, as few log lines
        need them.
        """
        columns = self._columns(len(self._values) - self._folded)
        self._folded = len(self._values)
        self._all.add(*columns)
        self._epoch.add(*columns)

    @property
    def updates(self) -> int:
        """The number of updates in total, including values that are no longer kept."""
        return self._updates

    @property
    def epoch_updates(self) -> int:
        """The number of updates in the current epoch."""
        return self._epoch_updates

    @property
    def data(self) -> tuple[np.ndarray, np.ndarray]:
        """Copies of the values and counts that are kept, oldest first, float64[n] each."""
        values, counts, _ = self._columns(len(self))
        return np.array(values), np.array(counts or [1] * len(values), np.float64)

    def mean(self, window_size: Window = None) -> float:
        """Return the mean of the newest `window_size` values, weighted by sample counts and
        weights.

        Without a window, or if it covers all updates, or for 'epoch', the mean is exact for any
        number of values.

        Raises:
          ValueError: the history is empty, or `window_size` is below 1 or more than the number of
            values kept.
        """
        totals = self._totals(window_size)
        return totals.sum / totals.weight if totals.weight else self._newest()

    def max(self, window_size: Window = None) -> float:
        """Return the largest of the newest `window_size` values.

        Arguments and errors as in `mean`.
        """
        totals = self._totals(window_size)
        return totals.max if totals.max >= totals.min else self._newest()

    def min(self, window_size: Window = None) -> float:
        """Return the smallest of the newest `window_size` values.

        Arguments and errors as in `mean`.
        """
        totals = self._totals(window_size)
        return totals.min if totals.max >= totals.min else self._newest()

    def current(self, window_size: Window = None) -> float:
        """Return the newest value, for any window; ValueError if the history is empty."""
        return self._newest()

    def statistics(self, method_name: str, *args: Any, **kwargs: Any) -> Any:
        """Call the statistic `method_name` with the other arguments.

        Names and errors as in `statistic`.
        """
        return self.statistic(method_name)(*args, **kwargs)

    def statistic(self, method_name: str) -> Callable[..., Any]:
        """Return the bound statistic `method_name`: 'mean', 'max', 'min', 'current' or a
        registered one.
        """
        if method_name not in self._statistics:
            raise UnknownNameError(
                f"no statistic is called {method_name!r}{closest(method_name, self._statistics)} "
                "(HistoryBuffer.register_statistics adds one)"
            )
        return types.MethodType(self._statistics[method_name], self)

    def state_dict(self) -> dict[str, Any]:
        """Return the newest values and the totals, as a JSON-serializable dict.

        At most 256 values, unless a window is longer.
        """
        self._fold()
        # A bounded number, so that checkpoints of long runs stay small; the totals below are over
        # all values.
        values, counts, weights = self._columns(min(self._num_saved, len(self)))
        return {
            "values": list(values),
            "counts": list(counts or [1] * len(values)),
            "weights": None if weights is None else list(weights),
            "updates": self._updates,
            "totals": dataclasses.asdict(self._all),
            "epoch": {
                "start": self.epoch_start,
                "updates": self._epoch_updates,
                **dataclasses.asdict(self._epoch),
            },
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Replace the history with a result of `state_dict`."""
        self._clear()
        self._values = array.array("d", map(float, state["values"]))
        if any(count != 1 for count in state["counts"]):
            self._counts = array.array("q", state["counts"])
        if (weights := state.get("weights")) is not None:
            self._weights = array.array("d", map(float, weights))
        self._folded = len(self._values)
        self._updates = int(state["updates"])
        if "totals" not in state:  # of an earlier version, which had no totals of the epoch
            old = {
                "sum": state["sum"],
                "weight": state["count"],
                "max": state["max"],
                "min": state["min"],
            }
            state = {**state, "totals": old, "epoch": {"start": -1, "updates": 0}}
        self._all = Totals(**{name: float(value) for name, value in state["totals"].items()})
        epoch = dict(state["epoch"])
        self.epoch_start = int(epoch.pop("start"))
        self._epoch_updates = int(epoch.pop("updates"))
        self._epoch = Totals(**{name: float(value) for name, value in epoch.items()})

    def __len__(self) -> int:
        return min(len(self._values), self._capacity)

    def __repr__(self) -> str:
        return f"HistoryBuffer({self._updates} values, the newest {len(self)} kept)"

    def _totals(self, window_size: Window) -> Totals:
        """Return the totals over a window."""
        if window_size is not None and window_size != "epoch" and window_size < self._updates:
            return self._sum_up(window_size)
        self._fold()
        return self._epoch if window_size == "epoch" else self._all

    def _newest(self) -> float:
        if not self._updates:
            raise ValueError("the history is empty: nothing has been logged under this key")
        return self._values[-1]

    def _sum_up(self, window_size: int) -> Totals:
        """Return the totals over the newest `window_size` values, fewer than all."""
        # A cut window would be the statistic of something else.
        if not 1 <= window_size <= self._capacity:
            raise ValueError(
                f"`window_size` must be 1 to {self._capacity}, the number of values that are kept, "
                f"got {window_size}; a window in `log_processor` keeps as many as it needs"
            )
        self.keep(window_size)
        values, counts, weights = self._columns(min(window_size, len(self)))
        if counts is None and weights is None and all(map(math.isfinite, values)):
            # exact, whatever the order
            return Totals(math.fsum(values), len(values), max(values), min(values))
        totals = Totals()
        totals.add(values, counts, weights)
        return totals

    def _columns(
        self, size: int
    ) -> tuple[Sequence[float], Sequence[int] | None, Sequence[float] | None]:
        """Return the newest values, with counts and weights, oldest first; None if all are 1."""
        rows = slice(len(self._values) - size, None)
        counts = None if self._counts is None else self._counts[rows]
        weights = None if self._weights is None else self._weights[rows]
        return self._values[rows], counts, weights


for _method in (HistoryBuffer.mean, HistoryBuffer.max, HistoryBuffer.min, HistoryBuffer.current):
    HistoryBuffer.register_statistics(_method)


def to_float(value: Any) -> float:
    """Convert a Python number, NumPy number or one-element array to a Python float."""
    if isinstance(value, str | bytes):  # `float` would read it
        raise TypeError(f"a logged scalar must be a number, got {value!r}")
    return float(value.item() if hasattr(value, "item") else value)
