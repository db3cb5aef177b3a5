"""End a run between two iterations on a signal, and all its processes together."""

import contextlib
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jengine.distributed import ShutdownConsensus
from jengine.distributed.processes import Processes, SingleProcess

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """Record SIGTERM and SIGINT while entered; the loop calls `check` between two iterations.

    The first signal is recorded, so that the current iteration finishes and can be saved; a second one of the
    same kind acts at once. Outside the main thread, where Python does not allow handlers, signals act as usual.

    Args:
      consensus: determines the iteration at which all processes end when one of them receives a signal.

    Attributes:
      signum: the signal that this process received; None for none.
      agreed: whether all processes end here, after a signal.
    """

    def __init__(self, consensus: ShutdownConsensus) -> None:
        self.signum: int | None = None
        self.agreed = False
        self._waiting = False
        self._consensus = consensus
        self._previous_handlers: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self.signum, self.agreed = None, False
        self._consensus.__enter__()
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {signum: signal.signal(signum, self._record) for signum in _SIGNALS}
        return self

    def __exit__(self, *error: Any) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers = {}
        self._consensus.__exit__(*error)

    def start_waiting(self) -> None:
        """Let a signal end the run at once from now on: the loop waits for data, perhaps forever.

        With several processes signals are still only recorded, since all processes must end at the same iteration.

        Raises:
          KeyboardInterrupt, SystemExit: as `check`, for a signal that was received just before.
        """
        self._waiting = not self._consensus.is_shared
        if self._waiting and self.signum is not None:
            self.check()

    def stop_waiting(self) -> None:
        """Record signals again until the next `check`."""
        self._waiting = False

    def check(self) -> None:
        """End the run if this process or another received a signal.

        Raises:
          KeyboardInterrupt: after SIGINT. SystemExit: after SIGTERM, with exit code 143.
          ProcessError: another process has failed.
        """
        signum = self._consensus.check(self.signum)
        if signum is None:
            return
        self.agreed = True
        if signum == signal.SIGINT:
            raise KeyboardInterrupt
        raise SystemExit(128 + signum)

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, self._previous_handlers[signum])
        if self._waiting:
            self.check()


def default_resume_command(path: str | None, *, guard: bool = False) -> str:
    """Return how to continue a run.

    Args:
      path: a checkpoint; None for the newest of the work dir, '' to start from scratch.
      guard: whether to add a numerics guard.
    """
    resume = [] if path == "" else [f"resume={path or True!r}"]
    hooks = ["default_hooks=dict(guard=dict(type='NumericsGuardHook'))"] if guard else []
    return f"Runner({', '.join(['...', *resume, *hooks])})"


@contextlib.contextmanager
def abort_all_on_error(processes: SingleProcess | Processes, interrupts: Interrupts) -> Iterator[None]:
    """End all processes on an error inside, unless all have agreed to end here.

    Raises:
      ProcessError: the error was caused by another process, which the message names.
    """
    try:
        yield
    except BaseException as error:
        if not interrupts.agreed:
            processes.fail(error)
        raise
