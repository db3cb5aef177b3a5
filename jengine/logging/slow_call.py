"""Log lines about calls that take long, while they run."""

import logging
import time

from jengine.logging.watchdog import Wait

_AFTER = 10.0  # seconds


class report_if_slow(Wait):
    """Log once that the body takes long, and how long it took.

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
        self._is_slow = False

    def report(self, seconds: float) -> None:
        """Log that the body takes long."""
        self._is_slow = True
        self._logger.info(f"{self._name} takes more than {self.limit:.0f} s.")

    def __exit__(self, *error: object) -> None:
        seconds = time.monotonic() - (self.since or 0)
        super().__exit__(*error)
        if self._is_slow and error[0] is None:
            self._logger.info(f"{self._name} took {seconds:.0f} s.")
