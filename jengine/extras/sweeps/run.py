"""Sweeps: many runs of one config, each in a process of its own."""

import contextlib
import errno
import fcntl
import os
import pathlib
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jengine.config.dump import format_config, write_config
from jengine.config.duration import IsDuration, parse_duration
from jengine.config.errors import ConfigError
from jengine.config.json_codec import encode
from jengine.config.storage import check_local_path, write_bytes
from jengine.extras.sweeps.check import Plan, Request, add_pruning, check
from jengine.extras.sweeps.launchers import Command, Job, Launcher, build_launcher
from jengine.extras.sweeps.progress import LiveTable
from jengine.extras.sweeps.search import Search
from jengine.extras.sweeps.space import Setting, check_range
from jengine.extras.sweeps.trials import (
    DONE,
    OUTPUT,
    STOP,
    Trial,
    make_trials,
    read_object,
    relative,
)

if TYPE_CHECKING:
    from jengine.extras.report.run_table import RunTable

FILE = "sweep.json"
_LOCK = "sweep.lock"
_POLL = 0.1  # seconds between two looks at the processes
_GRACE = 60.0  # seconds in which a run that is too late may save and end


class SweepInterrupted(KeyboardInterrupt):
    """Interrupt of a sweep, after all runs were saved."""


def sweep(
    cfg: str | os.PathLike[str] | Mapping[str, Any],
    *,
    grid: Mapping[str, Sequence[Any]] | None = None,
    ranges: Mapping[str, Sequence[Any]] | None = None,
    random: int = 0,
    search: int = 0,
    seeds: int | Sequence[int] = (),
    jobs: int = 1,
    work_dir: str | os.PathLike[str] | None = None,
    metric: str | None = None,
    overrides: Sequence[str] = (),
    launcher: str = "local",
    launcher_options: Mapping[str, Any] | None = None,
    max_time: str | None = None,
) -> "RunTable":
    """Train many variants of a config, each in a process of its own, and return a table of the
    runs.

    The configs of all runs are checked before the first one starts. A run that fails is a row of
    the table. A second call skips the runs that are finished, and continues or repeats the others.

    Args:
      cfg: a config file, or a config, which is written to the sweep's directory; functions and
        classes in it must be importable, so not from a notebook.
      grid: lists of values by config path; all combinations are run. A path may be shortened to an
        end that no other path in the config has: `lr`.
      ranges: `(low, high)`, perhaps with 'log' and 'int' after them, by config path, for `random`
        and `search`.
      random: number of settings to draw from `ranges` and `grid`; the same ones at each call.
      search: number of settings that Optuna chooses, one after the other; it ends runs that are
        worse than others.
      seeds: number of seeds for each setting, from 0, or a list of seeds; by default the seed of
        the config.
      jobs: number of runs at the same time.
      work_dir: the sweep's directory; `work_dirs/CONFIG_sweep` by default.
      metric: to search for; by default the first of the CheckpointHook's `save_best`.
      overrides: for all runs: `train_cfg.max_epochs=2`.
      launcher: 'local', 'submitit' for SLURM arrays, or 'ray'.
      launcher_options: see `SubmititLauncher` and `RayLauncher`.
      max_time: end a run this long after its start, '90m' or '12h': it is saved and counts as
        failed, and one that does not end within a minute is killed. For the launcher 'local'.

    Raises:
      ConfigError: a config or an argument is not valid; nothing was started.
      KeyboardInterrupt: after Ctrl-C, when all runs were saved.

    >>> sweep("configs/digits_cnn.py", grid={"lrr": [1e-3, 1e-2]}, seeds=4)
    Traceback (most recent call last):
    jengine.config.errors.ConfigError: 'lrr' must be a path in the config or the end of one; did you
    mean 'lr'?
    """
    directory = _find_directory(cfg, work_dir)
    config = os.fspath(cfg) if isinstance(cfg, str | os.PathLike) else _write(cfg, directory)
    request = Request(
        config=config,
        overrides=list(overrides),
        grid={path: _check_values(path, values) for path, values in (grid or {}).items()},
        ranges={path: check_range(path, limits) for path, limits in (ranges or {}).items()},
        draws=random,
        search=bool(search),
        seeds=list(range(seeds)) if isinstance(seeds, int) else list(seeds),
        metric=metric,
    )
    _check_numbers(request, random, search, seeds)
    if max_time is not None:
        if launcher != "local":
            raise ConfigError(
                f"`max_time` must come with launcher='local', got {launcher!r}: limit its jobs by "
                "`launcher_options`, such as timeout_min, or the runs by train_cfg.max_time"
            )
        if max_time not in IsDuration():
            raise ConfigError(f"`max_time` must be {IsDuration()}, got {max_time!r}")
    built = build_launcher(launcher, jobs, directory, launcher_options or {})
    plan = check(request)
    with _lock(directory):
        _claim(directory, request, plan)
        _Sweep(directory, request, plan, built, jobs, search, max_time).run()
    # imports JAX, which the runs should not wait for
    from jengine.extras.report.run_table import read_table

    return read_table([directory])


class _Sweep:
    """Loop over the runs of a sweep: starts them, waits for them, and ends them after an
    interrupt.
    """

    def __init__(
        self,
        directory: pathlib.Path,
        request: Request,
        plan: Plan,
        launcher: Launcher,
        jobs: int,
        search: int,
        max_time: str | None,
    ) -> None:
        self._max_time = max_time
        self._directory = directory
        self._request = request
        self._plan = plan
        self._launcher = launcher
        self._overrides = list(request.overrides)
        self._search: Search | None = None
        self._record: dict[str, str] | None = None  # of the study, for the hook
        self._left = 0
        self.trials: list[Trial] = []
        self._slots = launcher.jobs
        if search:
            self._search = Search(directory, plan.metric, plan.rule, plan.grid, plan.ranges)
            self._slots = min(self._slots, jobs)  # the next setting depends on the results
            self._record = self._search.record
            self._overrides += add_pruning(plan.metric, plan.rule)
            self.trials = [
                self._add(number, setting) for number, setting in self._search.unfinished()
            ]
            self._left = max(search - self._search.count() - len(self.trials), 0)
            self._total = search
        else:
            self.trials = make_trials(directory, plan.settings)
            self._total = len(self.trials)
        self._running: dict[int, tuple[Trial, Job]] = {}
        self._is_stopping = False

    def run(self) -> None:
        """Run to the end; SweepInterrupted after an interrupt."""
        waiting = [trial for trial in self.trials if trial.status not in DONE]
        if skipped := len(self.trials) - len(waiting):
            place = relative(self._directory)
            print(
                f"{skipped} of {self._total} runs in {place} are finished and skipped", flush=True
            )
        for trial in waiting:
            trial.write(self._record)
        with (
            LiveTable(self._directory.name, self._plan.metric, self._total) as view,
            _as_interrupt(),
        ):
            try:
                self._loop(waiting, view)
            except KeyboardInterrupt:
                self._stop(view)
                done = sum(trial.status in DONE for trial in self.trials)
                done = self._search.count() if self._search else done
                raise SweepInterrupted(f"{done} of {self._total} runs are finished") from None

    def _loop(self, waiting: list[Trial], view: LiveTable) -> None:
        while True:
            free = self._slots - len(self._running)
            batch: list[Trial] = []
            while len(batch) < free and (trial := self._next(waiting)):
                batch.append(trial)
            if batch:
                self._start(batch)
            if not self._running:
                return
            self._collect(view)
            view.update(self.trials)
            time.sleep(_POLL)

    def _next(self, waiting: list[Trial]) -> Trial | None:
        if waiting:
            return waiting.pop(0)
        if self._search is None or not self._left:
            return None
        self._left -= 1
        trial = self._add(*self._search.ask())
        self.trials.append(trial)
        return trial

    def _add(self, number: int, setting: Setting) -> Trial:
        (trial,) = make_trials(self._directory, [setting])
        trial.number = number
        trial.status = "waiting"
        trial.write(self._record)
        return trial

    def _start(self, batch: list[Trial]) -> None:
        commands = []
        for trial in batch:
            trial.start()
            arguments = trial.command(self._request.config, self._overrides)
            stop_file = trial.work_dir / STOP
            stop_file.unlink(missing_ok=True)
            commands.append(Command(arguments, str(trial.work_dir / OUTPUT), str(stop_file)))
        for trial, job in zip(batch, self._launcher.start(commands), strict=True):
            self._running[id(trial)] = (trial, job)

    def _collect(self, view: LiveTable) -> None:
        """Record the runs that ended."""
        for key, (trial, job) in list(self._running.items()):
            code = job.poll()
            if code is None:
                self._limit(trial, job)
                continue
            del self._running[key]
            trial.finish(code, self._is_stopping)
            trial.write(self._record)
            if self._search is not None:
                self._search.tell(trial, _best(trial, self._plan))
            view.end(trial, self.trials)

    def _limit(self, trial: Trial, job: Job) -> None:
        """End a run that takes too long; kill it if it does not end."""
        if self._max_time is None:
            return
        late = time.monotonic() - trial.started - parse_duration(self._max_time)
        if late > _GRACE:
            job.kill()
        elif late > 0 and not trial.max_time:
            trial.max_time = self._max_time
            job.stop()

    def _stop(self, view: LiveTable) -> None:
        """Let the runs save and end; after a second interrupt, end them at once."""
        self._is_stopping = True
        try:
            for _, job in self._running.values():
                job.stop()
            while self._running:
                self._collect(view)
                view.update(
                    self.trials, f"{len(self._running)} runs save and end; Ctrl-C again kills them."
                )
                time.sleep(_POLL)
        except KeyboardInterrupt:
            for _, job in self._running.values():
                job.kill()


def _best(trial: Trial, plan: Plan) -> float | None:
    """Return the best value of the metric in a run's validations."""
    from jengine.extras.report.run_table import read_table

    return read_table([trial.work_dir]).rows[0].best.get(plan.metric)


def _find_directory(cfg: Any, work_dir: str | os.PathLike[str] | None) -> pathlib.Path:
    if work_dir is not None:
        return pathlib.Path(check_local_path("work_dir", work_dir)).absolute()
    if not isinstance(cfg, str | os.PathLike):
        raise ConfigError("`work_dir` must be a directory for a config that is no file, got none")
    stem = pathlib.Path(os.fspath(cfg).partition(".py:")[0]).stem
    return pathlib.Path("work_dirs", f"{stem}_sweep").absolute()


def _write(cfg: Mapping[str, Any], directory: pathlib.Path) -> str:
    """Write a config to a file, from which the runs load it."""
    path = directory / "config.py"
    text, problems = format_config(cfg, path)
    if problems:
        raise ConfigError(
            f"a sweep's config must be loadable in another process: {'; '.join(problems)}"
        )
    if path.exists() and path.read_text() != text and (directory / FILE).exists():
        raise ConfigError(
            f"{relative(directory)} has the runs of another config: use another work_dir, or "
            "remove it"
        )
    write_config(text, path)
    return str(path)


def _check_numbers(request: Request, random: int, search: int, seeds: int | Sequence[int]) -> None:
    problem = ""
    if random < 0 or search < 0 or (random and search):
        problem = f"one of `random` and `search` may be above 0, got {random} and {search}"
    elif isinstance(seeds, int) and seeds < 0:
        problem = f"`seeds` must be at least 0, got {seeds}"
    elif search and request.seeds:
        problem = "a search has one seed, that of the config: seeds must be left out"
    elif search and not (request.grid or request.ranges):
        problem = "a search must have ranges or a grid, got neither"
    elif request.metric and not search:
        problem = f"`metric` must come with a search, got {request.metric!r}"
    if problem:
        raise ConfigError(problem)


def _check_values(path: str, values: Sequence[Any]) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable) or not (listed := list(values)):
        raise ConfigError(f"the grid of `{path}` must be a list of values, got {values!r}")
    return listed


@contextlib.contextmanager
def _lock(directory: pathlib.Path) -> Iterator[None]:
    """Keep other sweeps out of a directory; the kernel releases the lock, however the process ends.

    The lock of a run would need JAX, and here no process of its own may open the devices.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / _LOCK, "a+") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                file.seek(0)
                holder = file.read() or "a process that has not written its ID yet"
                raise ConfigError(
                    f"another sweep is running in {relative(directory)}: {holder}; wait for it to "
                    "end, stop it, or use another work_dir"
                ) from None
        file.truncate(0)
        file.write(f"process {os.getpid()} on host {socket.gethostname()}")
        file.flush()
        yield
        file.truncate(0)  # removing the file would let two others lock different ones


def _claim(directory: pathlib.Path, request: Request, plan: Plan) -> None:
    """Write what the sweep is about.

    ConfigError if its directory has the runs of another config.
    """
    path = directory / FILE
    known = read_object(path)
    if known and known.get("fingerprint") != plan.fingerprint:
        raise ConfigError(
            f"{relative(directory)} has the runs of another config, or of this file before it was "
            "changed: give another --work-dir, or remove it"
        )
    record = {
        "config": request.config,
        "overrides": list(request.overrides),
        "fingerprint": plan.fingerprint,
    }
    write_bytes(path, encode(record, indent=1).encode())


@contextlib.contextmanager
def _as_interrupt() -> Iterator[None]:
    """Turn SIGTERM into a KeyboardInterrupt, so that a scheduler ends a sweep as Ctrl-C does."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous: Callable[..., Any] | int | None = signal.signal(
        signal.SIGTERM, signal.default_int_handler
    )
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)
