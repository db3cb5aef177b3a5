"""Batches that are built ahead, in threads or in grain's worker processes."""

import atexit
import collections
import multiprocessing
import queue
import threading
import weakref
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

from jengine.config.plugins import load_provided
from jengine.data.batches import BatchSource
from jengine.data.host_entries import Batch

_WORKER = "grain-process-prefetch"  # start of the names of grain's processes


class BatchPrefetcher:
    """Iterator over batches from any index on, which threads and worker processes build ahead.

    Worker w of n builds the batches w, w + n, w + 2n and so on, until `stop`. Workers start at the
    first `seek`. With workers, `num_threads` and `prefetch_factor` count in each; without, in this
    process.

    Attributes:
      next: index of the next batch.
      stop: index after the last batch; 0 after an error.
    """

    def __init__(
        self,
        source: BatchSource,
        stop: int,
        num_workers: int,
        num_threads: int,
        prefetch_factor: int,
    ) -> None:
        ahead = num_threads, prefetch_factor
        self._readers: list[Any]
        if num_workers:
            start_workers = load_provided("batch_workers", "start_workers")
            self._readers = start_workers(source, stop, num_workers, *ahead)
        else:
            self._readers = [_Threads(source, stop, *ahead)]
        self.source = source
        self.next = 0
        self.stop = stop
        self._close = weakref.finalize(self, _close, self._readers)
        # At exit before multiprocessing ends its queues, as it is imported by now: functions run in
        # reverse order.
        atexit.register(self._close)

    def seek(self, index: int) -> None:
        """Continue at `index`.

        Threads and workers keep running, and drop what they have built ahead.
        """
        for worker, reader in enumerate(self._readers):
            reader.seek(-((worker - index) // len(self._readers)))
        self.next = index

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        try:
            batch = next(self._readers[self.next % len(self._readers)])
        except Exception:
            self.stop = 0  # the iterator of a failed reader cannot be used again
            raise
        self.next += 1
        return batch

    def close(self) -> None:
        """End the threads and processes."""
        self._close()
        atexit.unregister(self._close)


def _close(readers: list[Any]) -> None:
    while readers:
        readers.pop().close()


class _Threads:
    """Daemon threads that build batches ahead.

    At exit Python waits for a pool's threads, such as grain's, so a read that hangs would keep the
    process.
    """

    def __init__(
        self, source: BatchSource, stop: int, num_threads: int, prefetch_factor: int
    ) -> None:
        self._stop = stop
        self._num_threads = num_threads
        self._ahead = num_threads * prefetch_factor
        self._tasks: queue.SimpleQueue[tuple[Future[Batch], int] | None] = queue.SimpleQueue()
        self._futures: collections.deque[Future[Batch]] = collections.deque()
        self._submitted = 0  # index after the last batch in `_futures`
        for _ in range(num_threads):
            threading.Thread(
                target=_build, args=(source, self._tasks), name="jengine-batches", daemon=True
            ).start()

    def seek(self, index: int) -> None:
        """Continue at `index`."""
        self._cancel()
        self._submitted = index
        self._fill()

    def __next__(self) -> Batch:
        future = self._futures.popleft()  # batches come in order, whichever thread is first
        self._fill()
        return future.result()

    def close(self) -> None:
        """End the threads, each after the batch that it builds."""
        self._cancel()
        for _ in range(self._num_threads):
            self._tasks.put(None)

    def _fill(self) -> None:
        while len(self._futures) < self._ahead and self._submitted < self._stop:
            future: Future[Batch] = Future()
            self._futures.append(future)
            # The future is queued with its task, so that batches come out in order whichever thread
            # is faster.
            self._tasks.put((future, self._submitted))
            self._submitted += 1

    def _cancel(self) -> None:
        while self._futures:
            self._futures.pop().cancel()


def _build(
    source: BatchSource, tasks: "queue.SimpleQueue[tuple[Future[Batch], int] | None]"
) -> None:
    """Build the batches in `tasks` until None arrives."""
    while (task := tasks.get()) is not None:
        future, index = task
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(source[index])
            except BaseException as error:
                future.set_exception(error)
        del task, future  # a batch is freed when it has been used, not when the next one is built


def list_workers() -> list[multiprocessing.process.BaseProcess]:
    """Return grain's worker processes of all loaders."""
    return [p for p in multiprocessing.active_children() if p.name.startswith(_WORKER)]


def kill_workers() -> None:
    """Kill grain's worker processes.

    Otherwise it waits up to 25 seconds for one that hangs in a read.
    """
    for process in list_workers():
        process.kill()
