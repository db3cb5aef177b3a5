"""The slowest of several processes, for which the others wait within the step."""

import math
import platform
from collections.abc import Sequence

from jengine.hooks.runner_protocol import RunnerProtocol

_PHASES = ("input", "hooks", "logging")  # outside the step

Report = tuple[str, float]  # the host, and the seconds outside the step in an iteration


class SlowestProcess:
    """Watch that names the slowest of several processes in the next log line.

    See `IterTimerHook`.
    """

    def __init__(self) -> None:
        self._seconds = 0.0  # outside the step
        self._completed = 0  # iterations at the last exchange

    def start(self, runner: RunnerProtocol) -> None:
        """Start with the next iteration."""
        self._seconds = _own_seconds(runner)
        self._completed = runner.iter

    def request(self, runner: RunnerProtocol) -> Report:
        """Return the time that this process has spent outside the step."""
        seconds = _own_seconds(runner)
        completed = runner.iter + 1
        report = platform.node(), (seconds - self._seconds) / (completed - self._completed)
        self._seconds = seconds
        self._completed = completed
        return report

    def act(self, runner: RunnerProtocol, completed: int, requests: Sequence[Report]) -> float:
        """Show the slowest process in the next log line."""
        if len(requests) > 1:
            text = describe_slowest(requests)
            runner.message_hub.update_info("slowest", text, resumed=False)
        return math.inf

    def end(self, runner: RunnerProtocol, failed: bool) -> None:
        """Keep what was shown."""


def describe_slowest(reports: Sequence[Report]) -> str:
    """Return the process that spent the most time outside the step.

    >>> describe_slowest([("a", 0.1), ("b", 0.3)])
    'process 1 on b (0.3000 s of data and hooks, median 0.1000)'
    """
    times = [seconds for _, seconds in reports]
    index = max(range(len(times)), key=times.__getitem__)
    median = sorted(times)[(len(times) - 1) // 2]
    spent = f"{times[index]:.4f} s of data and hooks, median {median:.4f}"
    return f"process {index} on {reports[index][0]} ({spent})"


def _own_seconds(runner: RunnerProtocol) -> float:
    return sum(runner.stopwatch.seconds.get(phase, 0.0) for phase in _PHASES)
