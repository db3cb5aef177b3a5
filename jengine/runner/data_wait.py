"""Watch the waits of a run for its data."""

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from jengine.data import DataLoader, IterableLoader
from jengine.data.batch_prefetcher import kill_workers
from jengine.runner.interrupts import Interrupts

_AFTER = 30.0  # seconds
_POLLS = 60  # of the thread in that time


class Source(NamedTuple):
    """Name a loader: 'train_dataloader', and the loader."""

    name: str
    loader: DataLoader | IterableLoader

    def __str__(self) -> str:
        at = self.loader.state_dict()
        return f"{self.name} ({self.loader.kind}), batch {at['position'] + 1} of pass {at['epoch'] + 1}"


def iterate(batches: Iterable[Any], source: Source, interrupts: Interrupts) -> Iterator[Any]:
    """Yield the batches of a loader; meanwhile the run waits for it."""
    iterator = iter(batches)
    while True:
        try:
            interrupts.start_waiting(source)
            batch = next(iterator)
        except StopIteration:
            return
        finally:
            interrupts.wait = None
        yield batch


@contextlib.contextmanager
def watch_waits(interrupts: Interrupts, logger: logging.Logger, after: float = _AFTER) -> Iterator[None]:
    """Log a wait for data that takes long, again at each doubling; after SIGTERM, kill the data workers.

    A worker that hangs would otherwise keep the run from ending. A thread looks at `interrupts` twice a second, so that
    a wait itself costs no more than to record its start.

    Args:
      interrupts: has the current wait.
      logger: of the run.
      after: seconds after which a wait takes long.
    """
    done = threading.Event()

    def end_workers() -> None:
        if interrupts.agreed and interrupts.signum != signal.SIGINT:  # after that a notebook continues
            kill_workers()

    def watch() -> None:
        reported, due = None, after
        while not done.wait(after / _POLLS):
            end_workers()
            wait = interrupts.wait
            if wait is None:
                continue
            if wait is not reported:
                due = after
            seconds = time.monotonic() - wait[1]
            if seconds >= due:
                logger.warning(f"The run has waited {seconds:.0f} s for {wait[0]}.")
                reported, due = wait, 2 * due

    thread = threading.Thread(target=watch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        end_workers()
