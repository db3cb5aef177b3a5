"""Where the time of iterations goes, and the slowest ones with their cause."""

import pathlib
import weakref
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from jengine.config.json_codec import encode
from jengine.config.storage import write_bytes
from jengine.hooks.runner_protocol import RunnerProtocol

STALLS = "stalls.json"  # in the log directory
SLOW = 0.5  # seconds from which on an iteration is named
_GROUPS = dict(
    input="input",
    hooks="host",
    logging="host",
    compile="compile",
    step="device",
    checkpoint="save",
)
_KEPT = 10  # slowest iterations
_NAMED = 5  # of them in the log
_INTERVALS = 200  # of the shares

_records: "weakref.WeakKeyDictionary[Any, IterationTimes]" = weakref.WeakKeyDictionary()


class SlowIteration(NamedTuple):
    """An iteration that took long.

    Attributes:
      seconds: its time.
      cause: what took most of it: 'input', 'host', 'compile', 'device' or 'save'.
      place: the line of the user's code that ran, or ''.
    """

    seconds: float
    iteration: int
    cause: str
    place: str

    def __str__(self) -> str:
        place = f": {self.place}" if self.place else ""
        return f"{self.iteration} ({self.seconds:.1f} s, {self.cause}{place})"


class IterationTimes:
    """Times of iterations by cause, from samples of a run's stopwatch.

    Attributes:
      slowest: the slowest iterations, in decreasing order.
      intervals: seconds by cause of consecutive iterations, and their end. When there are too many,
        each two become one.

    >>> times = IterationTimes()
    >>> times.add(3, {"step": 0.1})
    >>> times.add(3, {"input": 2.0})
    >>> times.add(4, {"step": 0.1})
    >>> [str(slow) for slow in times.slowest]
    ['3 (2.1 s, input)']
    """

    def __init__(self) -> None:
        self.slowest: list[SlowIteration] = []
        self.intervals: list[tuple[int, Counter[str]]] = []
        self._iteration = -1
        self._spent: Counter[str] = Counter()
        self._place = ""
        self._total: Counter[str] = Counter()  # of the current interval
        self._length = 1.0  # seconds of an interval

    def add(
        self, iteration: int, seconds: Mapping[str, float], place: Callable[[], str] = str
    ) -> None:
        """Add the time since the last call.

        Args:
          iteration: the current one.
          seconds: the time by part of the stopwatch; less than 0 where it was found to be that of
            another part, as when a call of the step has compiled.
          place: returns the line of the user's code that runs; called once in a slow iteration.
        """
        spent: Counter[str] = Counter()
        parts: Any = spent  # whose values are no counts but seconds
        for part, value in seconds.items():
            if part in _GROUPS:
                parts[_GROUPS[part]] += value
        if iteration - 1 > self._iteration and sum(self._spent.values()) < SLOW:
            self._finish(iteration - 1)  # of several since the last call, it is the newest
        self._spent.update(spent)
        self._total.update(spent)
        if sum(self._spent.values()) >= SLOW and not self._place:
            self._place = place()
        if iteration != self._iteration:
            self._finish(iteration)

    def _finish(self, following: int) -> None:
        """End the current iteration."""
        seconds = sum(self._spent.values())
        if seconds >= SLOW and self._iteration >= 0:
            cause = self._spent.most_common(1)[0][0]
            place = self._place if cause in ("input", "host") else ""
            slow = SlowIteration(round(seconds, 3), self._iteration, cause, place)
            self.slowest = sorted([*self.slowest, slow], reverse=True)[:_KEPT]
        self._iteration = following
        self._spent = Counter()
        self._place = ""
        if sum(self._total.values()) >= self._length:
            self.intervals.append((following, self._total))
            self._total = Counter()
            if len(self.intervals) == 2 * _INTERVALS:
                pairs = zip(self.intervals[::2], self.intervals[1::2], strict=True)
                self.intervals = [(end, first + second) for (_, first), (end, second) in pairs]
                self._length *= 2

    def end(self) -> None:
        """End the last iteration."""
        self._finish(-1)

    def write(self, log_dir: str) -> None:
        """Write the file for `jengine report`."""
        content = dict(
            slowest=[slow._asdict() for slow in self.slowest],
            intervals=[dict(iteration=end, seconds=dict(spent)) for end, spent in self.intervals],
        )
        write_bytes(pathlib.Path(log_dir, STALLS), encode(content).encode())


def iteration_times(runner: RunnerProtocol) -> IterationTimes:
    """Return the times of a run's iterations in this session."""
    return _records.setdefault(runner, IterationTimes())


def name_slowest(
    runner: RunnerProtocol, seconds: Mapping[str, float], speed: float
) -> tuple[dict[str, tuple[float, str]], list[str]]:
    """Return a line with the slowest iterations, for the report at the end of a run."""
    times = iteration_times(runner)
    if not times.slowest:
        return {}, []
    if runner.is_main_process:
        times.write(runner.log_dir)
    named = "; ".join(map(str, times.slowest[:_NAMED]))
    return {}, [f"slowest iterations: {named}"]
