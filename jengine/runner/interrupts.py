"""End a run between two iterations on a signal, and end all its processes on an error."""

import contextlib
import dataclasses
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jengine.distributed import ShutdownConsensus
from jengine.distributed.processes import Processes, SingleProcess
from jengine.runner.workdir import Identity

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interrupts:
    """Record SIGTERM and SIGINT while entered; the loop calls `check` between two iterations.

    The first signal is recorded, so that the current iteration finishes and can be saved; a second one of the
    same kind acts at once. Outside the main thread, where Python allows no handlers, signals act as before.

    Args:
      consensus: finds where all processes end when one of them gets a signal.

    Attributes:
      agreed: whether all processes end here, after a signal.
    """

    def __init__(self, consensus: ShutdownConsensus) -> None:
        self.signum: int | None = None
        self.agreed = False
        self._waiting = False
        self._consensus = consensus
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Interrupts":
        self.signum, self.agreed = None, False
        self._consensus.__enter__()
        if threading.current_thread() is threading.main_thread():
            self._before = {signum: signal.signal(signum, self._note) for signum in _SIGNALS}
        return self

    def __exit__(self, *error: Any) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler)
        self._before = {}
        self._consensus.__exit__(*error)

    def start_waiting(self) -> None:
        """Let a signal end the run at once from now on: the loop waits for data, perhaps forever.

        With several processes it does not, since all of them must end at the same iteration.

        Raises:
          KeyboardInterrupt, SystemExit: as `check`, for a signal that came just before.
        """
        self._waiting = not self._consensus.is_shared
        if self._waiting and self.signum is not None:
            self.check()

    def stop_waiting(self) -> None:
        """Record signals again until the next `check`."""
        self._waiting = False

    def check(self) -> None:
        """End the run if a signal came, to this process or another.

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

    def _note(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, self._before[signum])
        if self._waiting:
            self.check()


# Clocks, drawn seeds and views of a shared file system differ between hosts.
_SHARED = ("log_dir", "timestamp", "experiment_name", "seed", "resume_from")


def broadcast_identity(identity: Identity, processes: SingleProcess | Processes) -> Identity:
    """Return the identity of the run as found by process 0."""
    mine = {name: getattr(identity, name) for name in _SHARED}
    return dataclasses.replace(identity, **processes.all_gather("the name of the run", mine)[0])


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
