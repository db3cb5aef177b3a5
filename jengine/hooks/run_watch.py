"""What a run reports about itself while it trains: progress in its record, the slowest process."""

import math
import platform
from typing import Any, NamedTuple

from jengine.config.plugins import load_each
from jengine.hooks.run_record import update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.parallel.processes import get_processes

PERIOD = 10.0  # seconds between two exchanges
# Phases of the loop outside the step: all processes wait for the slowest one within the step
_OWN_PHASES = ("input", "hooks", "logging")


class _Report(NamedTuple):
    host: str
    own_seconds: float  # outside the step, since the previous exchange
    elapsed: float  # since the previous exchange
    requests: tuple[Any, ...]  # one of each watch


class RunWatch:
    """Exchange of times and requests between the processes, about every 10 seconds of training.

    All processes exchange at the same iterations, since each computes the next one from the same
    values.

    A watch is a class in the section "run_watches" of an extra, made without arguments:
    `start(runner)` is called before training, `request(runner)` before an exchange, on each
    process; `act(runner, completed, requests)` with those of all processes, and it returns the
    step of the next exchange at the latest; `end(runner, failed)` after training.

    Attributes:
      next_step: number of completed iterations at which to call `exchange`.
    """

    def __init__(self) -> None:
        self.next_step: float = 1
        self._last_step = 0
        self._last_time = 0.0
        self._own_seconds = 0.0
        self._last_record = 0.0
        self._host = platform.node()
        self._watches = [watch() for watch in load_each("run_watches")]

    def start(self, runner: RunnerProtocol) -> None:
        """Start to watch with the next iteration."""
        self._last_step = runner.iter
        self.next_step = runner.iter + 1
        self._last_time = self._last_record = runner.train_loop.seconds
        self._own_seconds = _own_seconds(runner)
        for watch in self._watches:
            watch.start(runner)

    def exchange(self, runner: RunnerProtocol, completed: int) -> None:
        """Exchange reports after `completed` iterations."""
        seconds = runner.train_loop.seconds
        own = _own_seconds(runner)
        elapsed = seconds - self._last_time
        done = completed - self._last_step
        processes = get_processes()
        requests = tuple(watch.request(runner) for watch in self._watches)
        report = _Report(self._host, own - self._own_seconds, elapsed, requests)
        # a wait for the slowest process, as in the step itself
        with runner.stopwatch.part("step"):
            reports: list[_Report] = processes.all_gather("the times of the processes", report)
        if seconds - self._last_record >= PERIOD:
            self._last_record = seconds
            update_record(runner, background=True)  # what a kill loses is counted from here
        if processes.count > 1:
            runner.message_hub.update_info(
                "slowest", describe_slowest(reports, done), resumed=False
            )
        # Growing by two at most: the first iterations compile, and a loop may become slower
        due = math.ceil(PERIOD * done / max(reports[0].elapsed, 1e-9))
        self._last_step = completed
        self._last_time = seconds
        self._own_seconds = own
        self.next_step = completed + max(1, min(due, 2 * done))
        for i, watch in enumerate(self._watches):
            latest = watch.act(runner, completed, [report.requests[i] for report in reports])
            self.next_step = min(self.next_step, latest)

    def end(self, runner: RunnerProtocol, failed: bool = False) -> None:
        """End the watches, in a run that failed without a wait for the device."""
        for watch in self._watches:
            watch.end(runner, failed)


def describe_slowest(reports: list[_Report], iterations: int) -> str:
    """Return the process that spent the most time outside the step, where the others wait for
    it.
    """
    times = [report.own_seconds / iterations for report in reports]
    index = max(range(len(times)), key=times.__getitem__)
    median = sorted(times)[(len(times) - 1) // 2]
    return (
        f"process {index} on {reports[index].host} ({times[index]:.4f} s of data and hooks, "
        f"median {median:.4f})"
    )


def _own_seconds(runner: RunnerProtocol) -> float:
    return sum(runner.stopwatch.seconds.get(phase, 0.0) for phase in _OWN_PHASES)
