"""Background thread for writing logs."""

import atexit
import queue
import threading
from collections.abc import Callable
from typing import Any

from jengine.logging.watchdog import Wait

_MAX_PENDING_JOBS = 256  # without a bound, pending jobs could hold any number of device arrays
_PAUSE = 0.1  # seconds


class AsyncWriter:
    """Background thread that runs submitted jobs in order; the first job starts it.

    Once all are done it pauses for a tenth of a second, unless someone waits, so that jobs that
    follow one another quickly run together: each change between two threads takes time from both.

    If a job fails, the next `submit` or `flush` raises the error, once.

    Examples:
      >>> lines, writer = [], AsyncWriter()
      >>> writer.submit(lines.append, "loss: 0.5")
      >>> writer.flush()
      >>> lines
      ['loss: 0.5']
      >>> writer.close()
    """

    def __init__(self) -> None:
        self._jobs: queue.SimpleQueue[Callable[[], Any] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None
        self._is_awaited = threading.Event()

    def submit(self, job: Callable[..., Any], *args: Any) -> None:
        """Queue `job(*args)`; raise the error of an earlier job that failed."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="jengine-log", daemon=True)
            self._thread.start()
            # A daemon thread is killed at exit, in the middle of a line; so the process waits for
            # it.
            atexit.register(self.close)
        # Wait rather than drop: a log without some of its lines would mislead.
        if self._jobs.qsize() >= _MAX_PENDING_JOBS:
            self.flush()
        self._jobs.put(lambda: job(*args))
        self._raise_error()

    def flush(self) -> None:
        """Wait until all jobs are done and raise the error of one that failed.

        Return at once if a job calls it.
        """
        # A job that waits for all jobs would wait for itself.
        if threading.current_thread() is not self._thread:
            if self._thread is not None:
                done = threading.Event()
                self._jobs.put(done.set)
                self._is_awaited.set()
                with Wait("the thread that writes the log"):
                    done.wait()
            self._raise_error()

    def close(self) -> None:
        """Wait for all jobs and end the thread; the next job starts a new one.

        `flush` raises pending errors.
        """
        thread = self._thread
        self._thread = None
        if thread is not None:
            self._jobs.put(None)
            self._is_awaited.set()
            thread.join()
            atexit.unregister(self.close)

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception as error:
                # The first error is the cause; later ones often follow from it.
                self._error = self._error or error
            if self._jobs.empty():
                self._is_awaited.wait(_PAUSE)
                self._is_awaited.clear()

    def _raise_error(self) -> None:
        error = self._error
        self._error = None
        if error is not None:
            raise error
