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
    """Take batches from an iterable, as many at a time as have the same structure and shapes.

    Args:
      source: yields batches. It is closed with the stream if it has a `close`.
    """

    def __init__(self, source: Iterable[Any]) -> None:
        self._source = iter(source)
        self._drawn: collections.deque[Any] = collections.deque()
        self._error: Exception | None = None

    def take(self, count: int) -> list[Any]:
        """Return the next batches.

        Args:
          count: the number of batches, at least 1.

        Returns:
          Up to `count` batches of the same structure, shapes and dtypes: fewer before one that differs, before an
          error of the source, and at its end; none after the end.

        Raises:
          Exception: from the source, after the batches before it were taken.
        """
        if count == 1 and not self._drawn and self._error is None:
            return list(itertools.islice(self._source, 1))
        try:
            while len(self._drawn) < count and self._error is None:
                self._drawn.append(next(self._source))
        except StopIteration:
            pass
        except Exception as error:
            self._error = error
        if not self._drawn and self._error is not None:
            raise self._error
        taken = [self._drawn.popleft()] if self._drawn else []
        first = _signature(taken[0]) if count > 1 and taken else None
        while self._drawn and len(taken) < count and _signature(self._drawn[0]) == first:
            taken.append(self._drawn.popleft())
        return taken

    def close(self) -> None:
        """Close the source."""
        if hasattr(self._source, "close"):
            self._source.close()


def _signature(batch: Any) -> Any:
    leaves, treedef = jax.tree.flatten(batch)
    return treedef, [_SHAPE_DTYPE(leaf if hasattr(leaf, "dtype") else np.asarray(leaf)) for leaf in leaves]
