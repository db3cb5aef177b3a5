"""A thread that writes the log while training goes on."""

import atexit
import logging
import queue
import threading
from collections.abc import Callable


class LogWriter:
    """Runs what is submitted in the background, one job after the other, in order.

    At most one job waits while another runs: who submits a third waits for the first. So what is read from the device
    for the log is read at the latest one boundary later, and the queue does not grow.

    The thread is started by the first job.
    """

    def __init__(self) -> None:
        self._jobs: queue.Queue[Callable[[], None] | None] = queue.Queue(maxsize=1)
        self._thread: threading.Thread | None = None
        self._error: BaseException | None = None

    def submit(self, job: Callable[[], None], at_once: bool = False) -> None:
        """Has `job()` run after those before it.

        Args:
          job: what to run.
          at_once: run it here, unless others are before it: the threads of a Python process hinder each other, so that
            a short job that waits for no accelerator takes less time here than in another.
        """
        if at_once and self._jobs.unfinished_tasks == 0:
            job()
            return
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name="jengine-log", daemon=True)
            self._thread.start()
            atexit.register(self.close)  # a thread that the end of Python meets within a call ends it with an error
        self._jobs.put(job)

    def drain(self) -> None:
        """Waits until all jobs are done; at once in a job itself."""
        if self._thread is not None and self._thread is not threading.current_thread():
            self._jobs.join()

    def check(self) -> None:
        """Raises what a job has raised, once."""
        error, self._error = self._error, None
        if error is not None:
            raise error

    def close(self) -> None:
        """Waits until all jobs are done and ends the thread; the next job starts another. Raises nothing."""
        if self._thread is not None:
            self._jobs.put(None)
            self._thread.join()
            self._thread = None
            atexit.unregister(self.close)

    def filter(self, record: logging.LogRecord) -> bool:
        """For a `logging.Handler`: other lines come after those that were submitted before them."""
        self.drain()
        return True

    def _work(self) -> None:
        while True:
            job = self._jobs.get()
            try:
                if job is None:
                    return
                job()
            except BaseException as error:
                self._error = error
            finally:
                self._jobs.task_done()
