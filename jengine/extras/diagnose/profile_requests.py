"""Profiles that `jengine profile WORK_DIR` or SIGUSR2 requests while a run trains."""

import contextlib
import math
import os
import platform
import shlex
import signal
import threading
from types import FrameType
from typing import Any

import jax

from jengine.config.json_codec import decode_object
from jengine.config.storage import StorageError, read_bytes, remove_files, storage_path
from jengine.hooks.runner_protocol import RunnerProtocol

PROFILE_REQUEST = "profile_request.json"  # in the work dir, written by `jengine profile`
TRACES = "tf_tracing_logs"  # below the log directory
DEFAULT_STEPS = 5  # of a profile
_SIGNAL = "SIGUSR2"  # Windows has none


class ProfileRequests:
    """Watch that profiles the next iterations that one process requests; see `IterTimerHook`."""

    def __init__(self) -> None:
        self._trace = ""  # the name of the current one
        self._last = 0  # number of completed iterations at which the current trace ends
        self._steps = 0  # to profile, as a request says; 0 without one
        self._previous_handlers: dict[int, Any] = {}

    def start(self, runner: RunnerProtocol) -> None:
        """Take requests from now on, and the one that is there already."""
        signum = signal.Signals.__members__.get(_SIGNAL)
        if (
            signum
            and threading.current_thread() is threading.main_thread()
            and runner.processes.agree_on_signals
            and signal.getsignal(signum) is signal.SIG_DFL  # it does not stop the run either
        ):
            self._previous_handlers[signum] = signal.signal(signum, self._receive)
        self._read_request(runner)

    def _receive(self, signum: int, frame: FrameType | None) -> None:
        self._steps = max(self._steps, DEFAULT_STEPS)

    def request(self, runner: RunnerProtocol) -> tuple[str, int]:
        """Return the host, and the number of steps to profile."""
        steps = 0
        if not self._trace:  # otherwise after the current one
            steps = self._steps
            self._steps = 0
        runner.log_writer.submit(self._read_request, runner)  # a store takes its time
        return platform.node(), steps

    def act(self, runner: RunnerProtocol, completed: int, requests: list[tuple[str, int]]) -> float:
        """Start or end a trace, and return the step at which the current one ends."""
        if self._trace and completed >= self._last:
            self._end_trace(runner)
        steps = max(steps for _, steps in requests)
        if steps and not self._trace:
            self._start_trace(runner, completed, steps, [host for host, _ in requests])
        return self._last if self._trace else math.inf

    def end(self, runner: RunnerProtocol, failed: bool) -> None:
        """End the current trace, and take no more requests."""
        while self._previous_handlers:
            signal.signal(*self._previous_handlers.popitem())
        if self._trace:
            self._end_trace(runner, failed)

    def _start_trace(
        self, runner: RunnerProtocol, completed: int, steps: int, hosts: list[str]
    ) -> None:
        name = os.path.join(
            TRACES, f"iter_{completed}", own_directory(hosts, jax.process_index())
        ).rstrip(os.sep)
        try:
            jax.profiler.start_trace(os.path.join(runner.log_dir, name))
        except RuntimeError as error:  # a hook of the user traces
            runner.logger.warning(f"The requested profile cannot start: {error}")
            return
        self._trace = name
        self._last = completed + steps
        runner.logger.info(f"Profiling {steps} iterations from {completed} on, as requested.")

    def _end_trace(self, runner: RunnerProtocol, failed: bool = False) -> None:
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
                self._steps = max(int(decode_object(text)["steps"]), 1)
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
