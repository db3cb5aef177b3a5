"""Where the time of a run went: every second falls into one named part."""

import contextlib
import time
from collections.abc import Callable, Iterator


class TimeAccount:
    """A clock that always runs for exactly one part, so that the parts add up to the time since `start`.

    Switching costs less than a microsecond: a loop may do it several times an iteration.

    Args:
      clock: gives the time in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._part = ""
        self._since = clock()
        self.seconds: dict[str, float] = {}

    def start(self, part: str) -> None:
        """Forgets what was, and lets the time run for `part`."""
        self.seconds = {}
        self._part, self._since = part, self._clock()

    def switch(self, part: str) -> str:
        """Lets the time run for `part` from now on; returns the part that it ran for."""
        before, now = self._part, self._clock()
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._part, self._since = part, now
        return before

    def was(self, part: str) -> None:
        """Counts the time since the last switch for `part`: of some work it is known only afterwards what it was."""
        self._part = part

    @contextlib.contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Lets the time run for `part` inside, and for what it ran for before afterwards."""
        before = self.switch(part)
        try:
            yield
        finally:
            self.switch(before)

    def report(self) -> dict[str, float]:
        """Seconds by part up to now, the largest first."""
        self.switch(self._part)
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))
