"""Saves after a time instead of a number of epochs or iterations."""

import math
import time
from collections.abc import Callable

from jengine.hooks.runner_protocol import RunnerProtocol


class TimedSaves:
    """Saves after each `seconds`.

    The clocks of several processes differ, so process 0 decides. It tells the others so only at a
    few steps, which are known ahead: each time the next one is where half of the time that is left
    should have passed.
    """

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._seconds = seconds
        self._clock = clock
        self._since = 0.0
        self._asked = (0.0, 0)  # when, and at which step
        self._next = 0  # step at which process 0 is asked

    def start(self, runner: RunnerProtocol, step: int) -> None:
        """Begin to count the time: the run begins or continues at `step`, or the step before it
        was saved.
        """
        self._since = self._clock()
        self._asked = (self._since, step)
        self._next = step

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return `step` if the time is over.

        With several processes, the next step at which process 0 is asked.
        """
        if runner.processes.count > 1:
            return max(step, self._next)
        return step if self._remaining() <= 0 else math.inf

    def is_due(self, runner: RunnerProtocol, step: int) -> bool:
        """Return whether the time is over, by the clock of process 0."""
        remaining = self._remaining()
        if runner.processes.count == 1:
            return remaining <= 0
        if step < self._next:  # the hook acts for another reason
            return False
        now = self._clock()
        (last, last_step) = self._asked
        steps_left = remaining * max(step - last_step, 1) / max(now - last, 1e-6)
        is_over, ahead = runner.processes.broadcast(
            "time of a save", (remaining <= 0, max(1, int(steps_left / 2)))
        )
        self._asked = (now, step)
        self._next = step + ahead
        return bool(is_over)

    def _remaining(self) -> float:
        return self._since + self._seconds - self._clock()
