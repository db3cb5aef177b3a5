"""Lets a signal end training between two iterations, so that nothing is lost."""

import signal
import threading
from types import FrameType
from typing import Any

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """Notes SIGTERM and SIGINT while it is entered; whoever loops asks `check` between two iterations.

    The first signal is noted, so that the iteration under way is finished and can be saved; a second one of the
    same kind acts at once, as ever. Outside the main thread, where Python allows no handlers, signals act as before.
    """

    def __init__(self) -> None:
        self.signum: int | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self.signum = None
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._note) for signum in _SIGNALS}
        return self

    def __exit__(self, *_: Any) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}

    def check(self) -> None:
        """Ends the run if a signal came.

        Raises:
          KeyboardInterrupt: after SIGINT. SystemExit: after SIGTERM, with exit code 143.
        """
        if self.signum is None:
            return
        if self.signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + self.signum)

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, self._before[signum])
