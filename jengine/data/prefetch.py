"""Send batches to the device before they are needed."""

import collections
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax


def prefetch_to_device(
    batches: Iterable[Any], put: Callable[[Any], Any] = jax.device_put, depth: int = 2
) -> Generator[Any, None, None]:
    """Yield batches as device arrays, with `depth` of them sent ahead of the consumer.

    Transfers are asynchronous, so no thread is needed: while the device computes on a batch, the next ones are
    transferred.

    Args:
      batches: numpy pytrees.
      put: numpy pytree -> device pytree; it must not block. One call for the whole pytree is the fastest.
      depth: number of batches sent ahead of the current one of the consumer; 0 for none.

    Yields:
      Device pytrees, in order. An exception of the source is raised after the batches before it, with its traceback.

    Raises:
      ValueError: a negative depth.
    """
    if depth < 0:
        raise ValueError(f"depth must be 0 or more batches, got {depth}")
    return _prefetch(iter(batches), put, depth)


def _prefetch(source: Any, put: Callable[[Any], Any], depth: int) -> Generator[Any, None, None]:
    ready: collections.deque[Any] = collections.deque()
    source_error: Exception | None = None
    try:
        while True:
            try:
                while len(ready) <= depth:
                    ready.append(put(next(source)))
            except StopIteration:
                break
            except Exception as error:
                source_error = error
                break
            yield ready.popleft()
        while ready:
            yield ready.popleft()
        if source_error is not None:
            raise source_error
    finally:
        if hasattr(source, "close"):
            source.close()
