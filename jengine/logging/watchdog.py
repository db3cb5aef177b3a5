"""Watchdog: one thread that logs what a run waits for if that takes long, and where its threads
are.
"""

import itertools
import os
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Callable
from typing import Any, NoReturn

from jengine.config.errors import read_seconds
from jengine.logging.console import current_logger

_MAX_FRAMES = 100
_GRACE = 5.0  # seconds for the last log line of a process: the log may be what hangs
LIMIT_VARIABLE = "JENGINE_FAILURE_TIMEOUT"
LIMIT = read_seconds(LIMIT_VARIABLE, 300)

_lock = threading.Lock()
_changed = threading.Event()
_waits: "weakref.WeakSet[Wait]" = weakref.WeakSet()
_thread: threading.Thread | None = None
# each returns the stacks of other processes on this machine that work for this one
stack_sources: list[Callable[[], str]] = []


def all_stacks(*, with_workers: bool = True) -> str:
    """Return the stacks of all threads by name, and of worker processes, innermost frame first."""
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    lines = []
    # `faulthandler.dump_traceback` would end the process if a library starts a thread meanwhile
    for ident, innermost in sys._current_frames().items():
        lines.append(f"Thread {names.get(ident, hex(ident))} (most recent call first):")
        for frame, line in itertools.islice(traceback.walk_stack(innermost), _MAX_FRAMES):
            code = frame.f_code
            lines.append(f'  File "{code.co_filename}", line {line} in {code.co_name}')
    sources = stack_sources if with_workers else []
    return "\n".join(filter(None, [*lines, *(source() for source in sources)]))


class Wait:
    """Wait that is logged, once, when it has taken `limit` seconds, with the stacks of all threads.

    One that begins in each iteration, such as for a batch, is one object that sets `since`; others
    are the body of a `with` statement.

    Args:
      what: what is waited for; its text is taken when it is logged.
      limit: seconds.
      error: after `limit` seconds the process ends with this error; None to wait on.

    Attributes:
      since: `time.monotonic()` at the start of the wait; None while there is none.
    """

    def __init__(self, what: Any, limit: float = LIMIT, error: BaseException | None = None) -> None:
        global _thread
        self.what = what
        self.limit = limit
        self.since: float | None = None
        self._error = error
        self._reported: float | None = None
        with _lock:
            _waits.add(self)
            if _thread is None:
                _thread = threading.Thread(target=_watch, name="jengine-watchdog", daemon=True)
                _thread.start()
        _changed.set()

    def __enter__(self) -> "Wait":
        self.since = time.monotonic()
        return self

    def __exit__(self, *error: object) -> None:
        self.since = None

    def report(self, seconds: float) -> None:
        """Log the wait and the stacks of all threads; called in the watchdog's thread."""
        try:
            what = str(self.what)
        except Exception as error:  # it may ask the user's dataset where it is
            what = f"{type(self.what).__name__}, whose place is unknown: {error!r}"
        text = f"The run has waited {seconds:.0f} s for {what}"
        text += "." if self._error is None else f" ({LIMIT_VARIABLE}) and ends without that."
        logger = current_logger()
        logger.warning(text)
        logger.debug(f"All threads:\n{all_stacks()}")  # the log file has this level

    def look(self) -> float:
        """Report the wait if it is due; return the seconds until it must be looked at again."""
        since = self.since
        if since is None or since == self._reported:
            return self.limit
        seconds = time.monotonic() - since
        if seconds < self.limit:
            return self.limit - seconds
        self._reported = since
        if self._error is None:
            self.report(seconds)
            return self.limit
        thread = threading.Thread(target=self.report, args=[seconds], daemon=True)
        thread.start()
        thread.join(_GRACE)
        code: Any = 130 if isinstance(self._error, KeyboardInterrupt) else 1
        if isinstance(self._error, SystemExit):
            code = self._error.code or 0
        else:
            sys.excepthook(type(self._error), self._error, self._error.__traceback__)
        end_process(code if isinstance(code, int) else 1)  # else a message


def _watch() -> None:
    while True:
        _changed.clear()
        with _lock:
            waits = list(_waits)
        delay = min((wait.look() for wait in waits), default=None)
        del waits  # they end with their last reference elsewhere
        _changed.wait(None if delay is None else max(delay, 0.01))


def end_process(code: int) -> NoReturn:
    """End the process at once, from any thread.

    A normal exit waits for the device, for executors' threads and, in JAX, for other processes: for
    ever, if one of them is what hangs.
    """
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
