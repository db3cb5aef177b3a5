"""Record a profile of host and devices for some iterations, for TensorBoard and Perfetto."""

import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jengine.annotations import Count, Index
from jengine.errors import ConfigError, closest
from jengine.hooks.hook import Hook
from jengine.hooks.runner_protocol import Runner
from jengine.registry import HOOKS

_SCHEDULE = {"skip_first": 0, "wait": 0, "warmup": 0, "active": 1, "repeat": 1}


@HOOKS.register_module()
class ProfilerHook(Hook):
    """Trace training iterations with `jax.profiler`.

    Without a `schedule` the first epoch is traced, or with `by_epoch=False` the first `profile_times` iterations. With
    one, the first `skip_first` iterations are skipped; then, `repeat` times (0: to the end), `wait` and `warmup`
    iterations are skipped, and `active` ones are traced. The first two iterations compile, so let a schedule skip them.

    Each trace is a directory `iter_<first>` that TensorBoard's profile plugin opens.

    Args:
      by_epoch: trace a whole epoch.
      profile_times: epochs (1 at most) or iterations to trace.
      schedule: `dict(skip_first=0, wait=0, warmup=0, active=1, repeat=1)`, in iterations.
      on_trace_ready: a function that gets the directory of each trace, or `dict(type='tb_trace',
        dir_name=...)` with the directory of traces, relative to the log directory: `tf_tracing_logs`.

    Raises:
      ConfigError: more than one epoch, an invalid number or key; from the hook, more than the run has.
    """

    priority = "VERY_LOW"

    def __init__(
        self,
        *,
        by_epoch: bool = True,
        profile_times: Count = 1,
        schedule: Mapping[str, Index] | None = None,
        on_trace_ready: Callable[[str], Any] | Mapping[str, Any] | None = None,
    ) -> None:
        if by_epoch and profile_times > 1:
            raise ConfigError(f"ProfilerHook: profile_times must be 1 with by_epoch=True, got {profile_times}")
        if schedule is not None and by_epoch:
            raise ConfigError("ProfilerHook: a schedule needs by_epoch=False: it counts iterations")
        self.by_epoch = by_epoch
        self.profile_times = profile_times
        self.schedule = None if schedule is None else _checked(schedule)
        self._dir_name, self._on_ready = _destination(on_trace_ready)
        self._path: str | None = None  # of the current trace
        self._start = 0

    def before_run(self, runner: Runner) -> None:
        """Check that the run is long enough."""
        most = runner.max_epochs if self.by_epoch else runner.max_iters
        if runner.train_loop is not None and self.profile_times > most:
            unit = "epochs" if self.by_epoch else "iterations"
            raise ConfigError(
                f"ProfilerHook: profile_times must be at most the {most} {unit} of the run, got {self.profile_times}"
            )

    def before_train(self, runner: Runner) -> None:
        """Record the first iteration of this run: traced iterations are counted from it."""
        self._start = runner.iter

    def before_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None) -> None:
        """Start a trace if it is due."""
        if self._path is None and self._is_traced(runner, runner.iter - self._start):
            self._path = os.path.join(runner.log_dir, self._dir_name, f"iter_{runner.iter}")
            jax.profiler.start_trace(self._path)

    def after_train_iter(
        self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Mapping[str, Any] | None = None
    ) -> None:
        """Wait for the last iteration of a trace, and end the trace."""
        last = self._path is not None and not self._is_traced(runner, runner.iter + 1 - self._start)
        if last or (self._path is not None and self._ends_cycle(runner.iter - self._start)):
            self._finish(runner, outputs)

    def after_train(self, runner: Runner) -> None:
        """End the trace that is open at the end of training."""
        if self._path is not None:
            self._finish(runner, None)

    def next_step(self, runner: Runner, step: int) -> float:
        """Return the next step to trace, and the one after it, at which a trace ends."""
        if self._path is not None:
            return step
        done = step - self._start
        if (plan := self.schedule) is not None:  # on to the active part of the cycle
            idle = plan["wait"] + plan["warmup"]
            done = max(done, plan["skip_first"])
            done += max(idle - (done - plan["skip_first"]) % (idle + plan["active"]), 0)
        return self._start + done if self._is_traced(runner, done) else math.inf

    def _is_traced(self, runner: Runner, done: int) -> bool:
        """Return whether the iteration after `done` iterations is traced."""
        if self.schedule is None:
            return done < (len(runner.train_loop.dataloader) if self.by_epoch else self.profile_times)
        plan, idle = self.schedule, self.schedule["wait"] + self.schedule["warmup"]
        cycle, place = divmod(done - plan["skip_first"], idle + plan["active"])
        return done >= plan["skip_first"] and place >= idle and (not plan["repeat"] or cycle < plan["repeat"])

    def _ends_cycle(self, done: int) -> bool:
        if self.schedule is None:
            return False
        length = self.schedule["wait"] + self.schedule["warmup"] + self.schedule["active"]
        return (done - self.schedule["skip_first"] + 1) % length == 0

    def _finish(self, runner: Runner, outputs: Any) -> None:
        jax.block_until_ready(runner.state if outputs is None else outputs)
        jax.profiler.stop_trace()
        path, self._path = self._path, None
        assert path is not None
        runner.logger.info(f"ProfilerHook: wrote the trace {path}")
        if self._on_ready is not None:
            self._on_ready(path)


def _checked(schedule: Mapping[str, int]) -> dict[str, int]:
    for name, value in schedule.items():
        if name not in _SCHEDULE:
            raise ConfigError(f"ProfilerHook: schedule has no entry {name!r}{closest(name, _SCHEDULE)}")
        least = 1 if name == "active" else 0
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ConfigError(f"ProfilerHook: schedule[{name!r}] must be an integer of at least {least}, got {value!r}")
    return {**_SCHEDULE, **schedule}


def _destination(on_trace_ready: Any) -> tuple[str, Callable[[str], Any] | None]:
    """Return the directory of the traces, and the function that is called with each."""
    default = "tf_tracing_logs"
    if on_trace_ready is None:
        return default, None
    if hasattr(on_trace_ready, "items"):
        given = dict(on_trace_ready)
        kind = given.pop("type", None)
        if kind != "tb_trace":
            raise ConfigError(
                "ProfilerHook: on_trace_ready must be dict(type='tb_trace', dir_name=...) or a function, "
                f"got the type {kind!r}"
            )
        unknown = [name for name in given if name != "dir_name"]
        if unknown:
            raise ConfigError(f"ProfilerHook: a tb_trace has no {unknown[0]!r}{closest(unknown[0], ['dir_name'])}")
        return given.get("dir_name", default), None
    if not callable(on_trace_ready):
        raise TypeError(f"ProfilerHook: on_trace_ready must be a function or a dict, got {on_trace_ready!r}")
    return default, on_trace_ready
