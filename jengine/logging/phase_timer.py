"""Timer that attributes the whole time of a run to named phases."""

import contextlib
import time
from collections.abc import Callable, Iterator


class PhaseTimer:
    """Timer of exactly one phase at a time, so that the phases sum to the time since `start`.

    Args:
      clock: returns the time in seconds.

    Attributes:
      seconds: time by phase, up to the last switch.

    Examples:
      >>> clock = iter([0.0, 0.0, 2.0, 5.0, 6.0])
      >>> timer = PhaseTimer(clock=lambda: next(clock))
      >>> timer.start("step")
      >>> with timer.phase("logging"):
      ...     pass
      >>> timer.report()
      {'step': 3.0, 'logging': 3.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        # `perf_counter` and not `time`, which jumps when the system's clock is set.
        self._clock = clock
        self._phase = ""
        self._since = clock()
        self.seconds: dict[str, float] = {}

    def start(self, phase: str) -> None:
        """Reset all phases and start `phase`."""
        self.seconds = {}
        self._phase, self._since = phase, self._clock()

    def enter(self, phase: str) -> str:
        """Switch to `phase`; return the previous phase."""
        previous = self._phase
        now = self._clock()
        self.seconds[previous] = self.seconds.get(previous, 0.0) + now - self._since
        self._phase = phase
        self._since = now
        return previous

    def relabel(self, phase: str) -> None:
        """Attribute the time since the last switch to `phase`, for example if a call turned out
        to compile.
        """
        self._phase = phase

    @contextlib.contextmanager
    def phase(self, phase: str) -> Iterator[None]:
        """Time the body as `phase`, then switch back to the previous phase."""
        previous = self.enter(phase)
        try:
            yield
        finally:
            self.enter(previous)

    def report(self) -> dict[str, float]:
        """Return the seconds by phase up to now, in decreasing order."""
        self.enter(self._phase)
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))
