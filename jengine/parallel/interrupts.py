"""Signals that end a run between two iterations, in all processes together, and waits for data."""

import contextlib
import itertools
import os
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any, NamedTuple

from jengine.config.duration import parse_duration
from jengine.config.errors import ConfigError, closest
from jengine.data.batch_prefetcher import kill_workers
from jengine.data.iterables import IterableLoader
from jengine.data.loader import DataLoader
from jengine.logging.watchdog import Wait
from jengine.parallel.processes import ProcessGroup

_VARIABLE = "JENGINE_STOP_SIGNALS"
# Schedulers end a job with SIGTERM or SIGUSR1 (`sbatch --signal`), a lost terminal with SIGHUP
_DEFAULT = "SIGTERM,SIGINT,SIGHUP,SIGUSR1"
_ALWAYS_REPLACED = (signal.SIGTERM, signal.SIGINT)
_UNCATCHABLE = ("SIGKILL", "SIGSTOP")
_AFTER = 30.0  # seconds until a wait for data takes long


class WaitedLoader(NamedTuple):
    """Loader with the name in the config, such as 'train_dataloader'."""

    name: str
    loader: DataLoader | IterableLoader

    def __str__(self) -> str:
        at = self.loader.state_dict()
        batch = at["position"] + 1
        return f"{self.name} ({self.loader.kind}), batch {batch} of pass {at['epoch'] + 1}"


class Interrupts:
    """Recorder for signals that end a run while it is entered.

    The loop calls `check` between two iterations.

    The first signal is recorded, so that the current iteration finishes and can be saved; a second
    one of the same kind acts at once. Outside the main thread, where Python does not allow
    handlers, signals act as usual, and so do SIGHUP and others that are ignored, as by `nohup`, or
    have a custom handler; and all of them with several processes if JAX's preemption service is
    off.

    The environment variable `JENGINE_STOP_SIGNALS` names the signals; SIGTERM, SIGINT, SIGHUP and
    SIGUSR1 by default. With several processes SIGTERM belongs to JAX's preemption service, which
    agrees on the iteration at which all of them end; other signals are passed on to it as SIGTERM.

    Attributes:
      signum: the signal that this process received; None for none.
      agreed: whether all processes end here, after a signal.
      reason: what asked the run to end, if that is no signal: a setting with its value.
      wait: the wait for data, as the watchdog sees it.
      thread: the one that trains, while it does.

    Raises:
      ConfigError: the environment variable has something else than signal names.
    """

    def __init__(self, processes: ProcessGroup) -> None:
        self.signum: int | None = None
        self.agreed = False
        self.reason = ""
        self.wait = Wait(None, _AFTER)
        self.thread: int | None = None
        self._processes = processes
        self._previous_handlers: dict[int, Any] = {}
        names = [
            name.strip() for name in os.environ.get(_VARIABLE, _DEFAULT).split(",") if name.strip()
        ]
        known = {known.name: known for known in signal.Signals if known.name not in _UNCATCHABLE}
        for name in names:
            if name not in known and _VARIABLE in os.environ:
                raise ConfigError(
                    f"the environment variable {_VARIABLE} must be names of signals, separated by "
                    f"commas, got {name!r}{closest(name, known)}"
                )
        # Windows lacks some default ones
        self._signals = [known[name] for name in names if name in known]

    def __enter__(self) -> "Interrupts":
        # a notebook may train again after Ctrl-C
        self.signum = None
        self.agreed = False
        self.reason = ""
        self.thread = threading.get_ident()
        if (
            threading.current_thread() is threading.main_thread()
            and self._processes.agree_on_signals
        ):
            of_jax = signal.SIGTERM if self._processes.count > 1 else None
            # An ignored signal, or one with a custom handler, stays as it is
            free = {
                x
                for x in self._signals
                if x in _ALWAYS_REPLACED or signal.getsignal(x) is signal.SIG_DFL
            }
            self._previous_handlers = {
                signum: signal.signal(signum, self._record) for signum in free - {of_jax}
            }
        return self

    def __exit__(self, *error: object) -> None:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        self._previous_handlers = {}
        self.thread = None

    def _record(self, signum: int, frame: FrameType | None) -> None:
        self.signum = signum
        signal.signal(signum, self._previous_handlers[signum])  # a second one acts at once
        if self._processes.count > 1:
            os.kill(os.getpid(), signal.SIGTERM)  # the only signal that JAX's service handles
        elif self.wait.since is not None:
            self.check()

    def stop(self, reason: str) -> None:
        """End the run as after SIGTERM; with several processes, one of them calls this for all.

        From any thread.
        """
        self.reason = reason
        if self._processes.count > 1 or signal.SIGTERM in self._previous_handlers:
            # also ends a wait for data, or reaches the others through JAX
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            self.signum = signal.SIGTERM

    @contextlib.contextmanager
    def limit_time(self, max_time: str | None, elapsed: float) -> Iterator[None]:
        """Call `stop` after `train_cfg.max_time`, of which `elapsed` seconds are over, unless
        the body ends before.
        """
        # clocks differ: that of process 0 decides
        if max_time is None or self._processes.index > 0:
            yield
            return
        seconds = max(parse_duration(max_time) - elapsed, 0.0)
        timer = threading.Timer(seconds, self.stop, [f"train_cfg.max_time={max_time!r}"])
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()

    def check(self) -> None:
        """End the run if this process or another received a signal.

        Raises:
          KeyboardInterrupt: after SIGINT. SystemExit: after another signal, with exit code 128 +
            its number.
        """
        if self._processes.count > 1:
            if not self._processes.reached_sync_point():
                return
            self.signum = self.signum or signal.SIGTERM
        if self.signum is None:
            return
        self.agreed = True
        if self.signum == signal.SIGINT:  # after that a notebook continues
            raise KeyboardInterrupt
        kill_workers()  # one that hangs would keep the run from ending
        raise SystemExit(128 + self.signum)

    def start_waiting(self, data: WaitedLoader) -> None:
        """Let a signal end the run at once until `wait` has ended: `data` may take forever.

        With several processes signals are still only recorded, since all processes must end at the
        same iteration.
        """
        self.wait.what = data
        self.wait.since = time.monotonic()
        if self.signum is not None and self._processes.count == 1:
            self.check()


def iterate(batches: Iterable[Any], data: WaitedLoader, interrupts: Interrupts) -> Iterator[Any]:
    """Yield the batches of a loader; meanwhile the run waits for it."""
    iterator = iter(batches)
    for number in itertools.count(1):
        try:
            interrupts.start_waiting(data)
            batch = next(iterator)
        except StopIteration:
            return
        except Exception as error:
            error.add_note(f"in {data.name} ({data.loader.kind}), batch {number}")
            raise
        finally:
            interrupts.wait.since = None
        yield batch
