"""What a run reports about itself while it trains: progress in its record, the slowest process,
profiles on demand.
"""

import contextlib
import math
import os
import platform
import shlex
from typing import NamedTuple

import jax

from jengine.config.json_codec import decode_object
from jengine.config.storage import StorageError, read_bytes, remove_files, storage_path
from jengine.hooks.run_record import update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.parallel.processes import get_processes

PROFILE_REQUEST = "profile_request.json"  # in the work dir, written by `jengine profile`
TRACES = "tf_tracing_logs"  # below the log directory
DEFAULT_STEPS = 5  # of a profile
PERIOD = 10.0  # seconds between two exchanges
# Phases of the loop outside the step: all processes wait for the slowest one within the step
_OWN_PHASES = ("input", "hooks", "logging")


class _Report(NamedTuple):
    host: str
    own_seconds: float  # outside the step, since the previous exchange
    elapsed: float  # since the previous exchange
    profile_steps: int  # 0 unless a profile is requested


class RunWatch:
    """Exchange of times and requests between the processes, about every 10 seconds of training.

    All processes exchange at the same iterations, since each computes the next one from the same
    values.

    Attributes:
      next_step: number of completed iterations at which to call `exchange`.
    """

    def __init__(self) -> None:
        self.next_step = 1
        self._last_step = 0
        self._last_time = 0.0
        self._own_seconds = 0.0
        self._last_record = 0.0
        self._trace = ""  # the name of the current one
        self._requested = 0  # steps to profile, as the request file says
        self._host = platform.node()

    def start(self, runner: RunnerProtocol) -> None:
        """Start to watch with the next iteration."""
        self._last_step = runner.iter
        self.next_step = runner.iter + 1
        self._last_time = self._last_record = 0.0
        self._own_seconds = _own_seconds(runner)
        self._read_request(runner)

    def exchange(self, runner: RunnerProtocol, completed: int, seconds: float) -> None:
        """Exchange reports after `completed` iterations, and `seconds` of training since
        `start`; or end a profile.
        """
        if self._trace:
            self.end_trace(runner)
            self.next_step = completed + 1
            return
        own = _own_seconds(runner)
        elapsed = seconds - self._last_time
        done = completed - self._last_step
        processes = get_processes()
        requested = max(
            self._requested, DEFAULT_STEPS if runner.interrupts.profile_requested else 0
        )
        report = _Report(self._host, own - self._own_seconds, elapsed, requested)
        # a wait for the slowest process, as in the step itself
        with runner.phase_timer.phase("step"):
            reports: list[_Report] = processes.all_gather("the times of the processes", report)
        if seconds - self._last_record >= PERIOD:
            self._last_record = seconds
            update_record(runner, background=True)  # what a kill loses is counted from here
            # for the next exchange: a store takes its time
            runner.log_writer.submit(self._read_request, runner)
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
        if steps := max(report.profile_steps for report in reports):
            self._start_trace(runner, completed, steps, [report.host for report in reports])

    def _start_trace(
        self, runner: RunnerProtocol, completed: int, steps: int, hosts: list[str]
    ) -> None:
        runner.interrupts.profile_requested = False
        self._requested = 0
        name = os.path.join(
            TRACES, f"iter_{completed}", own_directory(hosts, jax.process_index())
        ).rstrip(os.sep)
        try:
            jax.profiler.start_trace(os.path.join(runner.log_dir, name))
        except RuntimeError as error:  # a hook of the user traces
            runner.logger.warning(f"The requested profile cannot start: {error}")
            return
        self._trace = name
        self.next_step = completed + steps
        runner.logger.info(f"Profiling {steps} iterations from {completed} on, as requested.")

    def end_trace(self, runner: RunnerProtocol, failed: bool = False) -> None:
        """End the current profile, if there is one; in a run that failed without a wait for the
        device.
        """
        if self._trace:
            if not failed:
                jax.block_until_ready(runner.state)  # or the trace would end before the device
            jax.profiler.stop_trace()
            # of a URL: where it will be sent
            path = os.path.join(runner.work_dir, runner.timestamp, self._trace)
            runner.logger.info(f"Wrote a profile to {path}. To view it: {view_command(path)}")
            self._trace = ""

    def _read_request(self, runner: RunnerProtocol) -> None:
        """Read and remove the request file, if there is one."""
        if not runner.is_main_process:
            return
        path = storage_path("work_dir", runner.work_dir) / PROFILE_REQUEST
        # nobody has requested one, or the store is asked again later
        with contextlib.suppress(OSError, StorageError):
            text = read_bytes(path).decode(errors="replace")
            remove_files([path])
            try:
                self._requested = max(int(decode_object(text)["steps"]), 1)
            except (ValueError, TypeError, KeyError, OverflowError):
                runner.logger.warning(
                    f"{path} must be as `jengine profile` writes it, got {text[:100]!r}"
                )


def own_directory(hosts: list[str], process: int) -> str:
    """Return the directory of a process's trace, since the profiler names its files by the host
    alone.

    >>> (
    ...     own_directory(["node-1", "node-1", "node-2"], 1),
    ...     own_directory(["node-1", "node-1", "node-2"], 2),
    ... )
    ('process_1', '')
    """
    return f"process_{process}" if hosts.count(hosts[process]) > 1 else ""


def view_command(path: str) -> str:
    """Return the shell command that shows a trace.

    >>> view_command("work_dirs/digits/20260101_000000/tf_tracing_logs/iter_40")
    'xprof --logdir work_dirs/digits/20260101_000000/tf_tracing_logs/iter_40'
    """
    return shlex.join(["xprof", "--logdir", path])


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
    return sum(runner.phase_timer.seconds.get(phase, 0.0) for phase in _OWN_PHASES)
