"""Failure reports between processes, so all of them tell why a run ends.

JAX's runtime watches the processes: when one sends no heartbeats, or a connection breaks, the
coordination service ends the others with a message that names it. It does not carry errors from
Python: the failed process would wait for the others in the shutdown barrier, and they for it in a
collective. So it publishes the error under one key in the coordination service and leaves without
the barrier; a thread in each other process waits for the key and ends it too.
"""

import atexit
import contextlib
import logging
import os
import re
import socket
import sys
import threading
from types import TracebackType
from typing import Any

import jax

from jengine.config.json_codec import decode, encode
from jengine.logging.watchdog import end_process

_KEY = "jengine/failure"
_BARRIER = "jengine/failure_received"
_DAY = 86_400_000  # milliseconds
_VERDICT_TIME = 110.0  # seconds; JAX's heartbeat timeout is 100, and `launch` sets less
_GRACE = 3.0  # seconds in which a failed process reports its error and closes its files
# The statuses of a collective or a connection that broke because another process is gone.
_STATUS = re.compile(
    r"^(UNKNOWN|INTERNAL|UNAVAILABLE|ABORTED|CANCELLED|DEADLINE_EXCEEDED|FAILED_PRECONDITION): "
)
logger = logging.getLogger("jengine")


class ProcessError(RuntimeError):
    """Error of processes that disagree about what they exchange, or cannot exchange anything."""


class FailureWatch:
    """Watch that ends this process when another fails, and publishes this one's failure.

    Args:
      client: JAX's client for the coordination service.
      index: this process.

    Attributes:
      failing: whether this process is about to end with an error, so it must not wait for others.
    """

    def __init__(self, client: Any, index: int) -> None:
        self.failing = False
        self._client = client
        self._index = index
        self._thread = threading.Thread(
            target=self._watch, name="jengine-failure-watch", daemon=True
        )

    def start(self) -> None:
        """Start the thread, and end this process in the right way after an error or at the
        normal exit.
        """
        self._thread.start()
        atexit.register(self._exit)
        self._print_error = sys.excepthook
        sys.excepthook = self._report_and_leave

    def fail(self, error: BaseException) -> None:
        """Publish that this process ends with `error`.

        It ends `_GRACE` seconds later at the latest.

        A broken collective is a consequence: another process will publish the cause, or JAX will
        end this one when it has detected which process is gone. So that error is only published if
        neither happens.
        """
        if self.failing:
            return
        if isinstance(error, RuntimeError | ValueError) and _STATUS.match(str(error)):
            logger.error(
                "A collective or a connection between processes broke "
                f"({str(error).splitlines()[0]}); waiting up to "
                f"{_VERDICT_TIME:g} s for the process that failed to be named."
            )
            with contextlib.suppress(Exception):  # nothing was published
                self._client.blocking_key_value_get(_KEY, int(1000 * _VERDICT_TIME))
                self._thread.join()  # it ends this process
        self.failing = True
        # the hook, the iteration
        notes = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
        name = f"process {self._index} (pid {os.getpid()} on host {socket.gethostname()})"
        reason = f"failed: {type(error).__name__}: {error}{notes}"[:2000]
        with contextlib.suppress(Exception):  # another process was first, or the service is gone
            self._client.key_value_set(
                _KEY, encode({"process": self._index, "name": name, "reason": reason})
            )
        timer = threading.Timer(_GRACE, self._leave)
        timer.daemon = True
        timer.start()

    def _watch(self) -> None:
        while True:
            try:
                failure = decode(self._client.blocking_key_value_get(_KEY, _DAY))
                break
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    # the run has ended, or JAX ends this process because the service is gone
                    return
        if self.failing or failure["process"] == self._index:
            return
        logger.error(f"This process ends because {failure['name']} {failure['reason']}")
        self._leave()

    def _leave(self) -> None:
        """End this process once the others have the failure, without JAX's barrier, in which
        they would be missed.
        """
        with contextlib.suppress(Exception):
            self._client.wait_at_barrier(_BARRIER, int(1000 * (_GRACE + 1)))
        if self._index == 0:  # the service ends with this process: let the others end first
            threading.Event().wait(0.5)
        end_process(1)

    def _exit(self) -> None:
        if self.failing:
            self._leave()
        # Shut down here instead of in JAX's own handler, which runs later: the thread must have
        # returned from the client before the interpreter is finalized, or it aborts the process.
        with contextlib.suppress(Exception):
            jax.distributed.shutdown()
        self._thread.join(_GRACE)

    def _report_and_leave(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> None:
        self._print_error(kind, error, trace)
        if self.failing or issubclass(kind, Exception):  # after Ctrl-C all processes end together
            self.fail(error)
            self._leave()  # Python would first join threads that may wait for other processes
