"""Take one or several batches of a source at a time."""

import collections
import itertools
import operator
from collections.abc import Iterable
from typing import Any

import jax
import numpy as np

_SHAPE_DTYPE = operator.attrgetter("shape", "dtype")


class BatchStream:
    """Take batches from an iterable, several at a time if they have the same structure and shapes.

    Args:
      source: yields batches. `close` closes it as well, if it has that method.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = iter(source)
        self._buffer: collections.deque[Any] = collections.deque()
        self._error: Exception | None = None

    def take(self, count: int) -> list[Any]:
        """Return the next batches.

        Args:
          count: the number of batches, at least 1.

        Returns:
          Up to `count` batches of the same structure, shapes and dtypes. There are fewer before a batch that differs,
          before an error of the source and at its end, and none after the end.

        Raises:
          Exception: raised by the source, once all batches before it have been taken.
        """
        if count == 1 and not self._buffer and self._error is None:
            return list(itertools.islice(self._source, 1))
        try:
            while len(self._buffer) < count and self._error is None:
                self._buffer.append(next(self._source))
        except StopIteration:
            pass
        except Exception as error:
            self._error = error
        if not self._buffer and self._error is not None:
            raise self._error
        taken = [self._buffer.popleft()] if self._buffer else []
        first = _signature(taken[0]) if count > 1 and taken else None
        while self._buffer and len(taken) < count and _signature(self._buffer[0]) == first:
            taken.append(self._buffer.popleft())
        return taken

    def close(self) -> None:
        """Close the source."""
        if hasattr(self._source, "close"):
            self._source.close()


def _signature(batch: Any) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [_SHAPE_DTYPE(leaf if hasattr(leaf, "dtype") else np.asarray(leaf)) for leaf in leaves]
