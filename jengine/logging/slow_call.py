"""Log lines about calls that take long, while they run."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from jengine.logging import console

_AFTER = 10.0  # seconds


@contextlib.contextmanager
def report_if_slow(
    name: str, after: float = _AFTER, logger: logging.Logger | None = None
) -> Iterator[None]:
    """Log once that the body takes long, and how long it took.

    On a TTY, show its seconds with a spinner meanwhile.

    Args:
      name: what the body does: 'compiling the training step'.
      after: seconds after which the body takes long.
      logger: the logger; by default that of the run.
    """
    logger = logger or logging.getLogger("jengine")
    start = time.monotonic()
    lock = threading.Lock()
    is_slow = False
    is_done = False
    with contextlib.ExitStack() as spinner:

        def report() -> None:
            nonlocal is_slow
            with lock:  # the body may end just now
                if not is_done:
                    is_slow = True
                    logger.info(f"{name[0].upper()}{name[1:]} takes more than {after:.0f} s.")
                    if console.terminal.is_terminal:
                        spinner.enter_context(_spin(name, after))

        timer = threading.Timer(after, report)
        timer.daemon = True
        timer.start()
        try:
            yield
        finally:
            timer.cancel()
            with lock:
                is_done = True
    if is_slow:
        logger.info(f"{name[0].upper()}{name[1:]} took {time.monotonic() - start:.0f} s.")


@contextlib.contextmanager
def _spin(name: str, elapsed: float) -> Iterator[None]:
    """Show a spinner with the seconds since the start of a call, `elapsed` s ago."""
    from rich import progress

    columns = (
        progress.SpinnerColumn(),
        progress.TextColumn("{task.description}"),
        progress.TimeElapsedColumn(),
    )
    with progress.Progress(*columns, console=console.terminal, transient=True) as spinner:
        spinner.add_task(name, total=None)
        spinner.tasks[0].start_time = spinner.get_time() - elapsed
        yield
