"""End a run between two iterations on a signal, and all its processes together."""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

from jengine.distributed import ShutdownConsensus
from jengine.distributed.processes import Processes, SingleProcess
from jengine.errors import ConfigError, closest

_VARIABLE = "JENGINE_STOP_SIGNALS"
# Schedulers end a job with SIGTERM, SIGUSR1 or SIGUSR2 (`sbatch --signal`), a lost terminal with SIGHUP
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGUSR1,SIGUSR2"
_ALWAYS_REPLACED = (signal.SIGTERM, signal.SIGINT)
_UNCATCHABLE = ("SIGKILL", "SIGSTOP")


class Interrupts:
    """Record the signals that end a run while entered; the loop calls `check` between two iterations.

    The first signal is recorded, so that the current iteration finishes and can be saved; a second one of the
    same kind acts at once. Outside the main thread, where Python does not allow handlers, signals act as usual, and so
    do SIGHUP and others that are ignored, as by `nohup`, or have a handler of the user's.

    The environment variable `JENGINE_STOP_SIGNALS` names the signals; SIGTERM, SIGINT, SIGHUP, SIGUSR1 and SIGUSR2 by
    default.

    Args:
      consensus: determines the iteration at which all processes end when one of them receives a signal.

    Attributes:
      signum: the signal that this process received; None for none.
      agreed: whether all processes end here, after a signal.

    Raises:
      ConfigError: the environment variable has something else than names of signals.
    """

    def __init__(self, consensus: ShutdownConsensus) -> None:
        self.signum: int | None = None
        self.agreed = False
        self._waiting = False
        self._consensus = consensus
        self._previous_handlers: dict[int, Any] = {}
        self._signals = _read_signals()

    def __enter__(self) -> "Interrupts":
        self.signum, self.agreed = None, False
        self._consensus.__enter__()
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                signum: signal.signal(signum, self._record) for signum in self._signals if _is_free(signum)
            }
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
          KeyboardInterrupt: after SIGINT. SystemExit: after another signal, with exit code 128 + its number: 143
            after SIGTERM.
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


def _read_signals() -> list[signal.Signals]:
    """Return the signals that end a run."""
    names = [name.strip() for name in os.environ.get(_VARIABLE, _DEFAULT).split(",") if name.strip()]
    known = {known.name: known for known in signal.Signals if known.name not in _UNCATCHABLE}
    for name in names:
        if name not in known and _VARIABLE in os.environ:
            raise ConfigError(
                f"the environment variable {_VARIABLE} must be names of signals, separated by commas, got "
                f"{name!r}{closest(name, known)}"
            )
    return [known[name] for name in names if name in known]  # Windows lacks some of the default


def _is_free(signum: int) -> bool:
    """Return whether a run may handle a signal: an ignored one, or one with a handler of the user's, stays as it is."""
    return signum in _ALWAYS_REPLACED or signal.getsignal(signum) is signal.SIG_DFL


def default_resume_command(path: str | None) -> str:
    """Return how to continue a run: from the checkpoint `path`, or from the newest of its work dir."""
    return f"Runner(..., resume={path or True!r})"


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
