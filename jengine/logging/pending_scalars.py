"""Buffer for scalars that nobody has read yet, so that the training loop never waits for the
device.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
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


@dataclasses.dataclass
class Part:
    """Values of one scalar at several iterations, in order.

    Attributes:
      key: the scalar name.
      steps: the iterations.
      values: the values, numbers and one-element device arrays, or numbers once they are fetched.
      count: samples in each value.
      weights: the weights in means; None if all are 1.
    """

    key: str
    steps: list[int]
    values: list[Any]
    count: int = 1
    weights: list[float] | None = None


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

    def fetch(self) -> tuple[list[Part], bool]:
        """Return all scalars on the host, and whether that took a transfer.

        All device arrays come at once, when they are computed.

        Raises:
          RuntimeError: the device failed, or an array was donated.
        """
        records = self.records
        columns = [Part(key, *column) for key, column in self.columns.items() if column[0]]
        parts = self._parts + columns
        values = [x for row in records for x in row[1].values()]
        values += [row[7] for row in records if row[7] is not None]
        values += [x for part in parts for x in part.values]
        arrays = {id(x): x for x in values if type(x) is not float}
        try:
            host = dict(zip(arrays, fetch_arrays([*arrays.values()]), strict=True))
        except Exception as error:
            pairs = [(f"train/{name}", x) for row in records for name, x in row[1].items()]
            pairs += [(part.key, x) for part in parts for x in part.values]
            deleted = {key for key, x in pairs if isinstance(x, jax.Array) and x.is_deleted()}
            if deleted:
                error.add_note(
                    f"{sorted(deleted)} were logged from donated arrays: log outputs of the step "
                    "instead"
                )
            raise

        def to_number(key: str, value: Any, index: int | None) -> float:
            if type(value) is float:
                return value
            value = host[id(value)]
            try:
                return float((value if index is None else value[index]).item())
            except Exception as error:
                error.add_note(f"in the scalar {key!r}")
                raise

        for part in parts:
            part.values = [to_number(part.key, x, None) for x in part.values]
        return [*_split_records(records, to_number), *parts], bool(arrays)


def _split_records(
    records: Sequence[Record], to_number: Callable[[str, Any, int | None], float]
) -> Iterator[Part]:
    """Yield the scalars of training iterations: learning rates, metrics, times."""
    steps = [row[0] for row in records]
    for name in dict.fromkeys(name for row in records for name in row[4]):
        rows = [row for row in records if name in row[4]]
        yield Part(f"train/{name}", [row[0] for row in rows], [row[4][name] for row in rows])
    for name in dict.fromkeys(name for row in records for name in row[1]):
        key = f"train/{name}"
        rows = [r for r in records if name in r[1] and (name not in r[3] or r[3][name][r[2]])]
        part = Part(key, [row[0] for row in rows], [to_number(key, r[1][name], r[2]) for r in rows])
        if any(row[7] is not None for row in rows):
            part.weights = [1.0 if r[7] is None else to_number(key, r[7], r[2]) for r in rows]
        if rows:
            yield part
    if records:
        yield Part("train/data_time", steps, [row[5] for row in records])
        yield Part("train/time", steps, [row[6] for row in records])


def fetch_arrays(arrays: list[Any]) -> list[np.ndarray]:
    """Return the arrays on the host: with one `jax.device_get`, or one by one without a copy if
    JAX computes on the CPU.
    """
    # device_get makes Python calls for each array, which cost more than the copy of a scalar
    if jax.default_backend() == "cpu":
        # The newest first: the thread waits for that one, and the others are ready then
        return [np.asarray(x) for x in reversed(arrays)][::-1]
    fetched: list[np.ndarray] = jax.device_get(arrays)
    return fetched
