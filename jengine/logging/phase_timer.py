"""Attribute every second of a run to one named phase."""

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Time exactly one phase at each moment, so that the phases add up to the time since `start`.

    Args:
      clock: returns the time in seconds.

    Attributes:
      seconds: time by phase, without that since the last switch.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self._clock = clock
        self._phase = ""
        self._since = clock()
        self.seconds: dict[str, float] = {}

    @property
    def current(self) -> str:
        """The phase that the clock runs for."""
        return self._phase

    def start(self, phase: str) -> None:
        """Reset all phases and start `phase`."""
        self.seconds = {}
        self._phase, self._since = phase, self._clock()

    def enter(self, phase: str) -> str:
        """Let the clock run for `phase` from now on; return the phase before."""
        before, now = self._phase, self._clock()
        self.seconds[before] = self.seconds.get(before, 0.0) + now - self._since
        self._phase, self._since = phase, now
        return before

    def relabel(self, phase: str) -> None:
        """Attribute the time since the last switch to `phase`, for example after a call that turned out to compile."""
        self._phase = phase

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Let the clock run for `phase` inside, and for the phase before afterwards."""
        before = self.enter(phase)
        try:
            yield
        finally:
            self.enter(before)

    def report(self) -> dict[str, float]:
        """Return the seconds by phase up to now, the largest first."""
        self.enter(self._phase)
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))
