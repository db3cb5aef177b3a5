"""Buffer for scalars that nobody has read yet, so that the training loop never waits for the
device.
"""

import bisect
import dataclasses
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import jax
import numpy as np

# An iteration: its number; the metrics by name, of a step or, as arrays real[K], of a chunk; the
# position in the chunk, or None; which steps report a metric, bool[K] by name; the learning rates
# by name; the seconds of waiting for data, and of the whole iteration; the weight in means, or
# None, real[] or real[K].
Record: TypeAlias = tuple[
    int,
    Mapping[str, Any],
    int | None,
    Mapping[str, Any],
    Mapping[str, float],
    float,
    float,
    Any,
]
# Numbers and one-element device arrays; or one array real[K] with the positions to take from it
_Values: TypeAlias = list[Any] | tuple[Any, list[int]]


@dataclasses.dataclass
class Part:
    """Values of one scalar at several iterations, in order.

    Attributes:
      key: the scalar name.
      steps: the iterations.
      values: the values.
      count: samples in each value.
      weights: the weights in means; None if all are 1.
    """

    key: str
    steps: list[int]
    values: Any  # `_Values`, a list of numbers once they are fetched
    count: int = 1
    weights: Any = None


class PendingScalars:
    """Scalars on the host and on the device, in the order in which they were added.

    Attributes:
      columns: steps and values by key, of scalars with one sample each: numbers or one-element
        arrays. Callers append to them directly; `start_column` adds one.
      records: training iterations, to which callers append directly.
      size: number of values to fetch, counted by the callers.
    """

    def __init__(self) -> None:
        self.columns: dict[str, tuple[list[int], list[Any]]] = {}
        self.records: list[Record] = []
        self.size = 0
        self._parts: list[Part] = []

    def start_column(self, key: str) -> tuple[list[int], list[Any]]:
        """Return the new, empty column of a key."""
        self.columns[key] = [], []
        return self.columns[key]

    def add(self, key: str, value: Any, step: int, count: int) -> None:
        """Add a sum over several samples."""
        if (column := self.columns.pop(key, None)) is not None:
            self._parts.append(Part(key, *column))
        self._parts.append(Part(key, [step], [value], count))

    def split(self, step: int) -> "PendingScalars":
        """Remove the columns' values after `step`, which hooks have added ahead of a chunk, and
        return them.
        """
        later = PendingScalars()
        for key, (steps, values) in self.columns.items():
            if steps[-1] > step:
                end = bisect.bisect_right(steps, step)
                later.columns[key] = steps[end:], values[end:]
                later.size += len(steps) - end
                del steps[end:], values[end:]
        return later

    def take(self) -> tuple[list[Part], bool]:
        """Remove all scalars and return them on the host, and whether that took a transfer.

        All device arrays come at once, when they are computed.

        Raises:
          RuntimeError: the device failed, or an array was donated. The scalars are dropped.
        """
        groups = itertools.groupby(self.records, _form)
        parts = [part for _, group in groups for part in _split_records(list(group))]
        parts += self._parts
        parts += [Part(key, *column) for key, column in self.columns.items() if column[0]]
        self.records = []
        self.columns = {}
        self._parts = []
        self.size = 0
        arrays = [x for part in parts for x in (*_arrays(part.values), *_arrays(part.weights))]
        key = ""
        try:
            fetched = iter(fetch_arrays(arrays))
            for part in parts:
                key = part.key
                part.values = _to_numbers(part.values, fetched)
                part.weights = _to_numbers(part.weights, fetched)
        except Exception as error:
            deleted = {part.key for part in parts if any(map(_is_deleted, _arrays(part.values)))}
            error.add_note(
                f"{sorted(deleted)} were logged from donated arrays: log outputs of the step "
                "instead"
                if deleted
                else f"in the scalar {key!r}"
            )
            raise
        return parts, bool(arrays)


def _form(record: Record) -> Any:
    """Return what records share that are one part: the chunk, or the names of the metrics."""
    _, metrics, index, _, rates, _, _, weight = record
    names = id(metrics) if index is not None else tuple(metrics)
    return names, tuple(rates), weight is None


def _split_records(records: Sequence[Record]) -> Iterator[Part]:
    """Yield the scalars of records with one form: learning rates, metrics, times."""
    columns = map(list, zip(*records, strict=True))
    steps, metrics, indices, reports, rates, data_times, times, weights = columns
    for name in rates[0]:
        yield Part(f"train/{name}", steps, [row[name] for row in rates])
    for name in metrics[0]:
        if indices[0] is None:
            weight = None if weights[0] is None else [*weights]
            yield Part(f"train/{name}", steps, [row[name] for row in metrics], 1, weight)
            continue
        reported = reports[0].get(name)
        rows = [i for i in indices if reported is None or reported[i]]
        shared = None if weights[0] is None else (weights[0], rows)
        first = steps[0] - indices[0]
        if rows:
            values = metrics[0][name], rows
            yield Part(f"train/{name}", [first + i for i in rows], values, 1, shared)
    yield Part("train/data_time", steps, data_times)
    yield Part("train/time", steps, times)


def _arrays(values: _Values | None) -> list[Any]:
    if isinstance(values, tuple):
        return [values[0]]
    if values is None or set(map(type, values)) == {float}:
        return []
    return [x for x in values if type(x) is not float]


def _is_deleted(array: Any) -> bool:
    return isinstance(array, jax.Array) and array.is_deleted()


def _to_numbers(values: _Values | None, fetched: Iterator[np.ndarray]) -> list[float] | None:
    if isinstance(values, tuple):
        return next(fetched)[values[1]].tolist()
    if values is None or set(map(type, values)) == {float}:
        return values
    return [x if type(x) is float else float(next(fetched).item()) for x in values]


def fetch_arrays(arrays: list[Any]) -> Iterable[np.ndarray]:
    """Return the arrays on the host: with one `jax.device_get`, or one by one without a copy if
    they are on the CPU.
    """
    # device_get makes Python calls for each array, which cost more than the copy of a scalar
    on_cpu = all(not isinstance(x, jax.Array) or _is_on_cpu(x.sharding) for x in arrays[:1])
    return map(np.asarray, arrays if on_cpu else jax.device_get(arrays))


# one sharding for all metrics of a run, and its set of devices is built at each call
@functools.lru_cache(maxsize=16)
def _is_on_cpu(sharding: jax.sharding.Sharding) -> bool:
    device: jax.Device = next(iter(sharding.device_set))
    return device.platform == "cpu"
