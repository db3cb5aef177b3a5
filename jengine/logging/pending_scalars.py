"""Scalars that wait in a buffer until something reads them, so that the training loop never waits for the device."""

import bisect
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

HOST_NUMBERS = frozenset({float, int, bool, np.float32, np.float64})


class _Run:
    """Values of one scalar that stand for equally many samples, with the steps that gave them."""

    __slots__ = ("samples", "steps", "taken", "values")

    def __init__(self, samples: int) -> None:
        self.samples = samples
        self.steps: list[int] = []
        self.values: list[float] = []
        self.taken = 0

    def take(self, step: float) -> list[float]:
        """Remove and return the values up to and including `step`."""
        start, self.taken = self.taken, bisect.bisect_right(self.steps, step, self.taken)
        return self.values[start : self.taken]


class PendingScalars:
    """Buffer of scalars, on the host and on the device, in the order in which they were added."""

    def __init__(self) -> None:
        # key; number, device array of one element, or array [K]; steps that gave its elements; which of them count
        # (None for all); samples that each element stands for. Plain tuples: this runs several times an iteration.
        self._entries: list[tuple[str, Any, Sequence[int], np.ndarray | None, int]] = []
        self._runs: dict[str, list[_Run]] = {}  # what was fetched and not taken
        self.size = 0

    def add(self, key: str, value: Any, step: int, samples: int = 1) -> None:
        """Append a number or a device array of one element."""
        self._entries.append((key, value, (step,), None, samples))
        self.size += 1

    def add_batch(self, key: str, values: Any, steps: Sequence[int], reported: np.ndarray | None) -> None:
        """Append an array real[K] with a value for each of `steps`; `reported`: bool[K], which of them count."""
        self._entries.append((key, values, steps, reported, 1))
        self.size += len(steps)

    def fetch(self) -> bool:
        """Transfer all device arrays with one `jax.device_get`, which waits for those that are not computed yet.

        Returns:
          True if there were device arrays.

        Raises:
          RuntimeError: the device failed, or an array was donated. The values are dropped.
        """
        entries, self._entries, self.size = self._entries, [], 0
        arrays = [e[1] for e in entries if type(e[1]) not in HOST_NUMBERS and isinstance(e[1], jax.Array)]
        try:
            fetched = iter(jax.device_get(arrays) if arrays else ())
        except RuntimeError as error:
            if any(array.is_deleted() for array in arrays):
                keys = {e[0] for e in entries if isinstance(e[1], jax.Array) and e[1].is_deleted()}
                error.add_note(f"{sorted(keys)} were logged from donated arrays: log what the step returns instead")
            raise
        for key, value, steps, reported, samples in entries:
            host = value if type(value) in HOST_NUMBERS else next(fetched) if isinstance(value, jax.Array) else value
            runs = self._runs.setdefault(key, [])
            if not runs or runs[-1].samples != samples:
                runs.append(_Run(samples))
            if len(steps) == 1:
                runs[-1].values.append(float(host if type(host) in HOST_NUMBERS else host.item()))
                runs[-1].steps += steps
            else:
                chosen = slice(None) if reported is None else reported
                runs[-1].values += host[chosen].tolist()
                runs[-1].steps += np.asarray(steps)[chosen].tolist()
        return bool(arrays)

    def take(self, step: float) -> Iterator[tuple[str, list[float], int]]:
        """Remove what was fetched up to and including `step`.

        Yields:
          The scalar, values of it in order, and the number of samples that each of them stands for.
        """
        for key, runs in self._runs.items():
            for run in runs:
                if values := run.take(step):
                    yield key, values, run.samples
        left = {key: [run for run in runs if run.taken < len(run.values)] for key, runs in self._runs.items()}
        self._runs = {key: runs for key, runs in left.items() if runs}
