"""Profile of host and devices for some iterations, for TensorBoard and Perfetto."""

import gzip
import math
import os
import pathlib
import platform
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax

from jengine.config.annotations import Count, Index
from jengine.config.errors import ConfigError, closest, config_path
from jengine.config.registry import HOOKS, check_arguments
from jengine.data.batch_check import Batch
from jengine.extras.diagnose.profile_requests import TRACES, own_directory, view_command
from jengine.hooks.hook import Hook, Outputs
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.parallel.processes import get_processes

_LOG_TRACE = (
    ": PyTorch's table of operators does not exist in JAX; xprof shows the operations of a "
    "tb_trace by time"
)


class Schedule(NamedTuple):
    """Iterations to skip and to trace."""

    skip_first: Index = 0
    wait: Index = 0
    warmup: Index = 0
    active: Count = 1
    repeat: Index = 1  # 0: to the end


@HOOKS.register_module()
class ProfilerHook(Hook):
    """Trace of training iterations with `jax.profiler`.

    Without a `schedule` the hook traces the first epoch, or with `by_epoch=False` the first
    `profile_times` iterations. With a schedule, which counts iterations in any case, it skips the
    first `skip_first` iterations; then, `repeat` times (0: to the end), it skips `wait` and
    `warmup` iterations and traces `active` ones. You should skip the first two iterations, which
    compile.

    Each trace is a directory `iter_<first>` that TensorBoard's profile plugin opens; below it each
    process has its own directory if a host has several.

    Args:
      by_epoch: trace a whole epoch.
      profile_times: epochs (1 at most) or iterations to trace.
      schedule: `dict(skip_first=0, wait=0, warmup=0, active=1, repeat=1)`, in iterations.
      on_trace_ready: a function that receives the directory of each trace, or
        `dict(type='tb_trace', dir_name=...)` with the directory of traces relative to the log
        directory, by default `tf_tracing_logs`.
      json_trace_path: a file for the newest trace as Chrome's JSON, which https://ui.perfetto.dev
        opens.

    Examples:
      >>> hook = ProfilerHook(by_epoch=False, schedule=dict(skip_first=10, active=5))
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        *,
        by_epoch: bool = True,
        profile_times: Count = 1,
        schedule: Mapping[str, Any] | None = None,
        on_trace_ready: Callable[[str], Any] | Mapping[str, Any] | None = None,
        json_trace_path: str | os.PathLike[str] | None = None,
    ) -> None:
        by_epoch = by_epoch and schedule is None
        if by_epoch and profile_times > 1:
            raise ConfigError(
                f"ProfilerHook: profile_times must be 1 with by_epoch=True, got {profile_times}"
            )
        self.by_epoch = by_epoch
        self.profile_times = profile_times
        with config_path("schedule"):
            check_arguments(Schedule, dict(schedule or {}))
        cycle = Schedule(active=profile_times) if schedule is None else Schedule(**schedule)
        self._skipped = cycle.skip_first
        self._idle = cycle.wait + cycle.warmup
        self._repeat = cycle.repeat
        self._active: float = cycle.active
        self.json_trace_path = json_trace_path
        self._dir_name, self._on_ready = _parse_on_trace_ready(on_trace_ready)
        self._path: str | None = None  # of the current trace
        self._own_directory = ""  # with several processes on this host
        self._start = 0  # the first iteration in this session

    def before_run(self, runner: RunnerProtocol) -> None:
        """Check that the run is long enough."""
        length = runner.max_epochs if self.by_epoch else runner.max_iters
        if runner.train_loop is not None and self.profile_times > length:
            unit = "epochs" if self.by_epoch else "iterations"
            raise ConfigError(
                f"ProfilerHook: profile_times must be at most the {length} {unit} of the run, got "
                f"{self.profile_times}"
            )

    def before_train(self, runner: RunnerProtocol) -> None:
        """Record the first iteration in this session, from which the schedule counts."""
        self._start = runner.iter
        processes = get_processes()
        hosts = processes.all_gather("the hosts of the processes", platform.node())
        self._own_directory = own_directory(hosts, processes.index)
        if self.by_epoch:
            self._active = runner.train_loop.epoch_length or math.inf  # then `after_train` ends it

    def before_train_iter(
        self, runner: RunnerProtocol, batch_idx: int, data_batch: Batch = None
    ) -> None:
        """Start a trace if it is due."""
        if self._path is None and self._is_traced(runner.iter - self._start):
            name = os.path.join(f"iter_{runner.iter}", self._own_directory).rstrip(os.sep)
            self._path = os.path.join(runner.log_dir, self._dir_name, name)
            jax.profiler.start_trace(
                self._path, create_perfetto_trace=self.json_trace_path is not None
            )

    def after_train_iter(
        self,
        runner: RunnerProtocol,
        batch_idx: int,
        data_batch: Batch = None,
        outputs: Outputs = None,
    ) -> None:
        """End the trace after its last iteration."""
        if self._path is not None:
            index = runner.iter - self._start
            # Cycles are counted after the skipped iterations, as in torch.profiler.schedule.
            ends_cycle = (index + 1 - self._skipped) % (self._idle + self._active) == 0
            if ends_cycle or not self._is_traced(index + 1):
                self._end_trace(runner, outputs)

    def after_train(self, runner: RunnerProtocol) -> None:
        """End the trace that is open at the end of training."""
        if self._path is not None:
            self._end_trace(runner, None)

    def next_step(self, runner: RunnerProtocol, step: int) -> float:
        """Return the next step to trace, or the step at which the current trace ends."""
        if self._path is not None:
            return step  # a chunk would run past its end
        # advance to the active part of the cycle
        index: float = max(step - self._start, self._skipped)
        index += max(self._idle - (index - self._skipped) % (self._idle + self._active), 0)
        return self._start + index if self._is_traced(index) else math.inf

    def _is_traced(self, index: float) -> bool:
        """Return whether to trace an iteration.

        `index` counts from the first iteration in this session.
        """
        cycle, position = divmod(index - self._skipped, self._idle + self._active)
        is_active = index >= self._skipped and position >= self._idle
        return is_active and (not self._repeat or cycle < self._repeat)

    def _end_trace(self, runner: RunnerProtocol, outputs: Any) -> None:
        # or the trace would end before the device
        jax.block_until_ready(runner.state if outputs is None else outputs)
        jax.profiler.stop_trace()
        path = self._path
        self._path = None
        assert path is not None
        # where it will be sent
        target = path.replace(runner.log_dir, os.path.join(runner.work_dir, runner.timestamp))
        runner.logger.info(
            f"ProfilerHook: wrote the trace {target}; to view it: {view_command(target)}"
        )
        if self.json_trace_path is not None and runner.is_main_process:
            _write_json_trace(path, self.json_trace_path)
        if self._on_ready is not None:
            self._on_ready(path)


def _write_json_trace(directory: str, target: str | os.PathLike[str]) -> None:
    """Write the newest trace below a directory as JSON, which JAX has compressed."""
    newest = max(pathlib.Path(directory).rglob("perfetto_trace.json.gz"), key=os.path.getmtime)
    os.makedirs(os.path.dirname(os.path.abspath(target)), exist_ok=True)
    with gzip.open(newest) as source, open(target, "wb") as file:
        shutil.copyfileobj(source, file)


def _parse_on_trace_ready(on_trace_ready: Any) -> tuple[str, Callable[[str], Any] | None]:
    """Return the directory of the traces, and the function to call with each trace directory."""
    if on_trace_ready is None or callable(on_trace_ready):
        return TRACES, on_trace_ready
    if not hasattr(on_trace_ready, "items"):
        raise TypeError(
            f"ProfilerHook: on_trace_ready must be a function or a dict, got {on_trace_ready!r}"
        )
    options = dict(on_trace_ready)
    kind = options.pop("type", None)
    if kind != "tb_trace":
        raise ConfigError(
            "ProfilerHook: on_trace_ready must be dict(type='tb_trace', dir_name=...) or a "
            f"function, got the type {kind!r}{_LOG_TRACE if kind == 'log_trace' else ''}"
        )
    for name in options:
        if name != "dir_name":
            raise ConfigError(
                f"ProfilerHook: a tb_trace has no {name!r}{closest(name, ['dir_name'])}"
            )
    return options.get("dir_name", TRACES), None
