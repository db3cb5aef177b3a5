"""A thread that writes the log while training goes on."""

import atexit
import collections
import logging
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

Job = Callable[[], Any]
Parts = Generator[None, None, None]

_PAUSE = 0.05  # seconds for which jobs are left to gather
_MOST = 256  # jobs that may wait


class LogWriter:
    """Runs what is submitted a little later, one job after the other, in order.

    Jobs that come shortly after each other are run together: where a line of the log is due every few iterations of a
    short step, each alone would take the processor's caches from the step and back, and so cost three times as much.
    For the same reason a job may be a generator: the first parts of all of them are run, then the second ones.

    A thread runs them, so that nobody waits for an accelerator. Jobs that have nothing to wait for are run by whoever
    submits the next, as the threads of a Python process hinder each other; the thread then sees to the last ones.

    Whoever must see that all is done runs what is left by `drain`. So does who submits one job too many, that what
    waits, and what it holds of the device's memory, does not grow. The thread is started by the first job.

    Args:
      waits: whether jobs wait for an accelerator.
    """

    def __init__(self, waits: bool = True) -> None:
        self._here = not waits
        self._pause = _PAUSE if waits else 4 * _PAUSE
        self._jobs: collections.deque[Job] = collections.deque()
        self._arrived = threading.Event()
        self._closed = threading.Event()
        self._running = threading.Lock()
        self._runs_in: int | None = None
        self._ran = -_PAUSE
        self._thread: threading.Thread | None = None
        self._error: Exception | None = None

    def submit(self, job: Job) -> None:
        """Has `job()` run after those before it; of a generator each part after the same part of those before it."""
        self._jobs.append(job)
        if len(self._jobs) >= _MOST or (self._here and time.perf_counter() - self._ran >= _PAUSE):
            self.drain()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="jengine-log", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread that the end of Python meets within a call ends it with an error
        if not self._arrived.is_set():
            self._arrived.set()

    def drain(self) -> None:
        """Runs what is left to do, here; returns at once in a job itself."""
        if self._runs_in != threading.get_ident() and (self._jobs or self._runs_in is not None):
            self._run()

    def check(self) -> None:
        """Raises what a job has raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Runs what is left to do and ends the thread; the next job starts another. Raises nothing."""
        if self._thread is not None:
            self._closed.set()
            self._arrived.set()
            self._thread.join()
            self._thread = None
            self._closed.clear()
            atexit.unregister(self.close)
        self.drain()

    def filter(self, record: logging.LogRecord) -> bool:
        """For a `logging.Handler`: other lines come after those that were submitted before them."""
        self.drain()
        return True

    def _work(self) -> None:
        while not self._closed.is_set():
            self._arrived.wait()
            self._arrived.clear()
            while self._jobs and not self._closed.wait(self._pause):
                if time.perf_counter() - self._ran >= self._pause:  # else somebody else sees to them
                    self._run()

    def _run(self) -> None:
        with self._running:
            self._runs_in = threading.get_ident()
            try:
                while self._jobs:
                    begun = [self._begin(self._jobs.popleft()) for _ in range(len(self._jobs))]
                    running = [parts for parts in begun if parts is not None]
                    while running:
                        running = [parts for parts in running if self._goes_on(parts)]
            finally:
                self._runs_in = None
                self._ran = time.perf_counter()

    def _begin(self, job: Job) -> Parts | None:
        """Runs a job, or makes it what its parts come from."""
        try:
            parts = job()
        except Exception as error:
            self._error = error
            return None
        return parts if isinstance(parts, Generator) else None

    def _goes_on(self, parts: Parts) -> bool:
        """Runs the next part of a job; whether there may be another."""
        try:
            next(parts)
        except StopIteration:
            return False
        except Exception as error:
            self._error = error
            return False
        return True
