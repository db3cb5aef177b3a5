"""Send batches to the device before they are needed."""

import contextlib
from collections.abc import Callable, Generator, Iterable
from typing import Any

import jax

from jengine.data.batch_stream import BatchStream


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
    return _prefetch(BatchStream(batches, put, depth))


def _prefetch(stream: BatchStream) -> Generator[Any, None, None]:
    with contextlib.closing(stream):
        while taken := stream.take(1):
            yield taken.pop()
