"""Write logs in a background thread."""

import concurrent.futures
import threading
from collections.abc import Callable
from typing import Any

_MAX_PENDING = 256  # jobs; more would hold arrays of the device, and memory, without bound


class AsyncWriter:
    """Run jobs in one background thread, in the order in which they are submitted.

    An error of a job is raised in the thread that calls `submit` or `flush` next, once. The thread is started by the
    first job.
    """

    def __init__(self) -> None:
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._thread: int | None = None
        self._pending: list[concurrent.futures.Future[Any]] = []

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Run `job(*args)` after the jobs before it.

        Raises:
          Exception: from an earlier job.
        """
        self._raise_first_error(wait=len(self._pending) >= _MAX_PENDING)
        if self._pool is None:
            self._pool = concurrent.futures.ThreadPoolExecutor(1, "jengine-log", self._note_thread)
        self._pending.append(self._pool.submit(job, *args))

    def flush(self) -> None:
        """Wait until all jobs are done; return at once when a job calls it.

        Raises:
          Exception: from a job.
        """
        if threading.get_ident() != self._thread:
            self._raise_first_error(wait=True)

    def close(self) -> None:
        """Wait for all jobs and end the thread; the next job starts another. Errors of jobs are kept for `flush`."""
        if self._pool is not None:
            self._pool.shutdown(wait=True)
            self._pool = self._thread = None

    def _note_thread(self) -> None:
        self._thread = threading.get_ident()

    def _raise_first_error(self, wait: bool) -> None:
        if wait:
            concurrent.futures.wait(self._pending)
        while self._pending and self._pending[0].done():
            if (error := self._pending.pop(0).exception()) is not None:
                raise error
