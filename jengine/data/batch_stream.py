"""Batches from a source, one or several at a time, sent to the device ahead of the consumer."""

import collections
import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax

from jengine.data.batch_check import BatchForm, batch_form
from jengine.data.host_entries import Batch

Position = Any  # of a loader's `state_dict`


class BatchStream:
    """Stream of batches, several at a time if they have the same structure and shapes.

    >>> import numpy as np
    >>> stream = BatchStream({"x": np.full(2, i)} for i in range(3))
    >>> len(stream.take(2)), len(stream.take(2)), len(stream.take(2))
    (2, 1, 0)

    Args:
      source: yields batches. `close` closes its iterator as well, if that has the method.
      check: batch -> form, called once for each batch; raises for one that cannot be used.
      put: batch -> batch on the device, called as soon as a batch is read; it must not block. None
        keeps it as it is.
      depth: number of batches that are read, and sent to the device, ahead of those taken.
      position: returns the data position after the last batch that was read; by default the
        source's `state_dict`, if it has one.

    Attributes:
      position: the position after the last batch that was taken; None before the first, and without
        positions.
      positions: the position after each batch in the last call to `take`.
    """

    def __init__(
        self,
        source: Iterable[Batch],
        check: Callable[[Batch], BatchForm] = batch_form,
        put: Callable[[Batch], Batch] | None = None,
        depth: int = 0,
        position: Callable[[], Position] | None = None,
    ) -> None:
        self.position: Position = None
        self.positions: list[Position] = []
        # a foreign iterable has none
        own: Callable[[], Position] = getattr(source, "state_dict", lambda: None)
        self._get_position = position or own
        self._source = iter(source)
        self._check = check
        self._put = put
        self._depth = depth
        self._buffer: collections.deque[tuple[Batch, BatchForm, Position]] = collections.deque()
        self._is_done = False  # the source has ended, at the position `_end`, or failed
        self._error: Exception | None = None
        self._end: Any = None

    def take(self, count: int) -> list[Batch]:
        """Return the next batches.

        Args:
          count: the number of batches, at least 1.

        Returns:
          Up to `count` batches whose arrays have the same structure, shapes and dtypes. There are
          fewer before a batch that differs, before an error and at the end, and none after the end.

        Raises:
          Exception: raised by the source, once all batches before it have been taken.
        """
        buffer = self._buffer
        # those ahead are on their way to the device while this one is used
        wanted = count + self._depth
        while len(buffer) < wanted and not self._is_done:
            try:
                batch = next(self._source)
                # once, and before the transfer: chunks are compared by it
                form = self._check(batch)
                buffer.append(
                    (batch if self._put is None else self._put(batch), form, self._get_position())
                )
            except StopIteration:
                self._is_done = True
                self._end = self._get_position()
            except Exception as error:
                self._is_done = True  # raised after the batches before it
                self._error = error
        if not buffer:
            if self._error is not None:
                raise self._error
            self.position = self._end
            return []
        batch, form, self.position = buffer.popleft()
        taken = [batch]
        self.positions = [self.position]
        while buffer and len(taken) < count and buffer[0][1] == form:
            batch, _, self.position = buffer.popleft()
            taken.append(batch)
            self.positions.append(self.position)
        return taken

    def close(self) -> None:
        """Close the source."""
        if hasattr(self._source, "close"):
            self._source.close()


def prefetch_to_device(
    batches: Iterable[Batch],
    put: Callable[[Batch], Batch] = jax.device_put,
    depth: int = 2,
    check: Callable[[Batch], BatchForm] = batch_form,
) -> Generator[Batch, None, None]:
    """Yield batches as device arrays, with `depth` of them sent ahead of the consumer.

    Transfers are asynchronous, so no thread is needed: while the device computes on a batch, the
    next ones travel.

    >>> import numpy as np
    >>> [int(batch["x"]) for batch in prefetch_to_device({"x": np.int32(i)} for i in range(3))]
    [0, 1, 2]

    Args:
      batches: numpy pytrees.
      put: numpy pytree -> device pytree; it must not block. One call for the whole pytree is the
        fastest.
      depth: number of batches sent ahead; 0 for none.
      check: see `BatchStream`.

    Raises:
      ValueError: a negative depth. A source's exception is raised after the batches before it, with
        the traceback.
    """
    # Here and not in the generator, whose body runs only when the first batch is asked for.
    if depth < 0:
        raise ValueError(f"depth must be 0 or more batches, got {depth}")

    def prefetch() -> Generator[Batch, None, None]:
        # Closed with the generator: a loop that breaks off must not leave batches on the device.
        with contextlib.closing(BatchStream(batches, check, put, depth)) as stream:
            while taken := stream.take(1):
                yield taken.pop()

    return prefetch()
