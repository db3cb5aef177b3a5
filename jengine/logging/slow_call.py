"""Log lines about calls that take long, while they run."""

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

from jengine.logging import console
from jengine.logging.watchdog import Wait

_AFTER = 10.0  # seconds


class report_if_slow(Wait):
    """Log once that the body takes long, and how long it took.

    On a TTY, show its seconds with a spinner meanwhile.

    Args:
      name: what the body does: 'compiling the training step'.
      after: seconds after which the body takes long.
      logger: the logger; by default that of the run.
    """

    def __init__(
        self, name: str, after: float = _AFTER, logger: logging.Logger | None = None
    ) -> None:
        super().__init__(name, after)
        self._name = f"{name[0].upper()}{name[1:]}"
        self._logger = logger or logging.getLogger("jengine")
        self._spinner = contextlib.ExitStack()
        self._spinning = threading.Lock()  # the body may end just as the spinner starts
        self._is_slow = False

    def report(self, seconds: float) -> None:
        """Log that the body takes long."""
        with self._spinning:
            if self.since is not None:
                self._is_slow = True
                self._logger.info(f"{self._name} takes more than {self.limit:.0f} s.")
                if console.terminal.is_terminal:
                    self._spinner.enter_context(_spin(str(self.what), self.limit))

    def __exit__(self, *error: object) -> None:
        assert self.since is not None
        seconds = time.monotonic() - self.since
        super().__exit__(*error)
        with self._spinning, self._spinner:
            pass
        if self._is_slow and error[0] is None:
            self._logger.info(f"{self._name} took {seconds:.0f} s.")


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
