"""Timer that attributes the whole time of a run to named parts."""

import contextlib
import time
from collections.abc import Callable, Iterator


class Stopwatch:
    """Timer of exactly one part at a time, so that the parts sum to the time since `start`.

    Args:
      clock: returns the time in seconds.

    Attributes:
      seconds: time by part, up to the last switch.
      current: the part that is timed now.
      since: when the last switch was.

    Examples:
      >>> clock = iter([0.0, 0.0, 2.0, 5.0, 6.0])
      >>> timer = Stopwatch(clock=lambda: next(clock))
      >>> timer.start("step")
      >>> with timer.part("logging"):
      ...     pass
      >>> timer.report()
      {'step': 3.0, 'logging': 3.0}
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        # `perf_counter` and not `time`, which jumps when the system's clock is set.
        self._clock = clock
        self.current = ""
        self.since = clock()
        self.seconds: dict[str, float] = {}

    def start(self, part: str) -> None:
        """Reset all parts and start `part`."""
        self.seconds = {}
        self.current = part
        self.since = self._clock()

    def enter(self, part: str) -> str:
        """Switch to `part`; return the previous part."""
        previous = self.current
        now = self._clock()
        self.seconds[previous] = self.seconds.get(previous, 0.0) + now - self.since
        self.current = part
        self.since = now
        return previous

    def relabel(self, part: str) -> None:
        """Attribute the time since the last switch to `part`, for example if a call turned out
        to compile.
        """
        self.current = part

    @contextlib.contextmanager
    def part(self, part: str) -> Iterator[None]:
        """Time the body as `part`, then switch back to the previous part."""
        previous = self.enter(part)
        try:
            yield
        finally:
            self.enter(previous)

    def report(self) -> dict[str, float]:
        """Return the seconds by part up to now, in decreasing order."""
        self.enter(self.current)
        return dict(sorted(self.seconds.items(), key=lambda item: -item[1]))
