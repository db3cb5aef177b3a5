"""Send batches to the device before they are needed."""

import collections
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax


def prefetch_to_device(
    batches: Iterable[Any], put: Callable[[Any], Any] = jax.device_put, depth: int = 2
) -> Generator[Any, None, None]:
    """Yield the batches of `batches` as device arrays, `depth` of them ahead of the consumer.

    Transfers are asynchronous, so starting one early is enough, without a thread: while the device computes on a batch,
    the next ones are transferred.

    Args:
      batches: numpy pytrees.
      put: numpy pytree -> device pytree; it must not wait. One call for the whole pytree costs least.
      depth: number of batches that are sent ahead of the one that the consumer has; 0 for none.

    Yields:
      Device pytrees, in order. An exception of the source is raised after the batches before it, with its traceback.

    Raises:
      ValueError: a negative depth.
    """
    if depth < 0:
        raise ValueError(f"depth must be 0 or more batches, got {depth}")
    return _ahead(iter(batches), put, depth)


def _ahead(source: Any, put: Callable[[Any], Any], depth: int) -> Generator[Any, None, None]:
    ready: collections.deque[Any] = collections.deque()
    failure: BaseException | None = None
    try:
        while True:
            try:
                while len(ready) <= depth:
                    ready.append(put(next(source)))
            except StopIteration:
                break
            except Exception as error:
                failure = error
                break
            yield ready.popleft()
        while ready:
            yield ready.popleft()
        if failure is not None:
            raise failure
    finally:
        if hasattr(source, "close"):
            source.close()
