"""Thread that watches over training: where a run is that hangs or that is asked for its stacks, and
slow iterations.
"""

import contextlib
import json
import math
import threading
import time
from collections.abc import Mapping
from typing import Any

import jax

from jengine.config.json_codec import decode_object
from jengine.config.storage import (
    StorageError,
    is_url,
    read_bytes,
    remove_files,
    storage_path,
    write_bytes,
)
from jengine.extras.diagnose.failing_examples import list_some
from jengine.extras.diagnose.stacks import find_own_lines
from jengine.extras.diagnose.stalls import iteration_times
from jengine.hooks.iter_timer import PERIOD
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.watchdog import LIMIT, all_stacks
from jengine.model.selection import describe_tree
from jengine.parallel.processes import get_client

STACKS_REQUEST = "stacks_request.json"  # in the work dir, written by `jengine stacks`
_SAMPLE = 0.1  # seconds between two looks at the stopwatch
_LOOK = 1.0  # at the request, and at the progress
_ANSWER = 5.0  # for the other processes to send their stacks
_MAX_SENT = 100_000  # characters of the stacks of another process
_MAX_COLLECTIVES = 8
_MAX_OTHERS = 8  # processes
_BOARD = "jengine/watch/"  # start of the keys in the coordination service


class ProgressWatch:
    """Watch that logs, once, where a run is that makes no progress, and answers `jengine stacks`.

    It works in a thread, so that it also does when the main thread hangs. The limit is that of the
    watchdog, JENGINE_FAILURE_TIMEOUT. See `IterTimerHook`.
    """

    def __init__(self) -> None:
        self._thread: _Thread | None = None
        self._written = 0.0

    def start(self, runner: RunnerProtocol) -> None:
        """Start the thread."""
        self._written = time.monotonic()
        self._thread = _Thread(runner)
        self._thread.start()

    def request(self, runner: RunnerProtocol) -> None:
        """Request nothing."""

    def act(self, runner: RunnerProtocol, completed: int, requests: list[None]) -> float:
        """Write the times of iterations for `jengine report` from time to time."""
        if runner.is_main_process and time.monotonic() - self._written >= PERIOD:
            self._written = time.monotonic()
            runner.log_writer.submit(iteration_times(runner).write, runner.log_dir)
        return math.inf

    def end(self, runner: RunnerProtocol, failed: bool) -> None:
        """End the thread."""
        if self._thread is not None:
            self._thread.stop.set()
            self._thread.join(_LOOK)  # it may wait for a store
            self._thread = None


class _Thread(threading.Thread):
    """Thread that watches one training until `stop` is set."""

    def __init__(self, runner: RunnerProtocol) -> None:
        super().__init__(name="jengine-progress", daemon=True)
        self.stop = threading.Event()
        self._runner = runner
        self._run = runner.run
        self._times = iteration_times(runner)
        self._seconds = dict(self._run.stopwatch.seconds)
        self._progress: Any = None
        self._since = time.monotonic()  # of the last progress
        self._next_look = self._next_request = 0.0
        self._is_reported = False
        self._board = _Board(self._run.processes) if self._run.processes.count > 1 else None

    def run(self) -> None:
        """Look at the run until the end."""
        while not self.stop.wait(_SAMPLE):
            try:
                self._sample()
                if time.monotonic() >= self._next_look:
                    self._next_look = time.monotonic() + _LOOK
                    self._look()
            except Exception as error:  # a store, or the coordination service
                self._run.logger.debug("The watch over the progress failed.", exc_info=error)
        self._sample()
        self._times.end()

    def _sample(self) -> None:
        """Add the time since the last call to that of the current iteration."""
        stopwatch = self._run.stopwatch
        seconds = dict(stopwatch.seconds)
        part = stopwatch.current
        seconds[part] = seconds.get(part, 0.0) + max(time.perf_counter() - stopwatch.since, 0.0)
        spent = {name: x - self._seconds.get(name, 0.0) for name, x in seconds.items()}
        self._seconds = seconds
        if getattr(self._runner.train_loop, "batch", None) is None:
            # Between iterations: a validation, whose program may compile, is of none
            spent = {part: spent.get(part, 0.0) for part in ("input", "checkpoint")}
        self._times.add(self._runner.iter, spent, self._own_line)

    def _own_line(self) -> str:
        return next(iter(find_own_lines(all_stacks(with_workers=False))), "")

    def _look(self) -> None:
        loop = self._runner.train_loop
        progress = loop.iter, self._run.stopwatch.since, self._run.interrupts.wait.since
        if progress != self._progress:
            self._progress = progress
            self._since = time.monotonic()
            self._is_reported = False
        waited = time.monotonic() - self._since
        if self._board is not None:
            self._board.show(loop.iter, self._run.stopwatch.current, self._since)
            self._board.answer()
        if waited >= LIMIT and not self._is_reported:
            self._is_reported = True
            self._report(waited)
        if self._run.is_main_process and time.monotonic() >= self._next_request:
            self._next_request = time.monotonic() + (PERIOD if is_url(self._run.work_dir) else 0)
            self._answer()

    def _report(self, waited: float) -> None:
        """Log where the run is: in one warning, and with all stacks in the log file."""
        where, stacks = self._describe(waited)
        logger = self._run.logger
        logger.warning(
            f"Training has made no progress for {waited:.0f} s: {'; '.join(where)}. The log "
            "file has the stacks of all threads."
        )
        logger.debug(f"All threads:\n{stacks}")

    def _answer(self) -> None:
        """Write the stacks that `jengine stacks` has requested."""
        path = storage_path("work_dir", self._run.work_dir) / STACKS_REQUEST
        try:
            name = decode_object(read_bytes(path).decode(errors="replace"))["name"]
        except (OSError, StorageError):  # nobody has requested any
            return
        except (ValueError, KeyError):
            name = ""
        remove_files([path])
        if not str(name).isalnum():
            self._run.logger.warning(f"{path} must be as `jengine stacks` writes it")
            return
        where, stacks = self._describe(time.monotonic() - self._since)
        text = "\n".join([*where, "", stacks])
        write_bytes(path.parent / answer_name(name), text.encode())

    def _describe(self, waited: float) -> tuple[list[str], str]:
        """Return where the run is, a text for each thing that is known, and all stacks."""
        run = self._run
        runner = self._runner
        loop = runner.train_loop
        length = f" of {loop.max_iters:,}" if math.isfinite(loop.max_iters) else ""
        lines = [
            f"iteration {loop.iter:,}{length}, in `{run.stopwatch.current}` for {waited:.0f} s"
        ]
        stacks = all_stacks()
        lines += [f"at {line}" for line in find_own_lines(stacks)]
        if run.interrupts.wait.since is not None:
            with contextlib.suppress(Exception):  # it asks the user's data where they are
                lines.append(f"it waits for {run.interrupts.wait.what}")
        if run.processes.subject:
            lines.append(f"it exchanges {run.processes.subject} with the other processes")
        with contextlib.suppress(RuntimeError):  # tokens that come and go
            tokens: list[Any] = list(run.limiter.tokens)  # whose type lacks `is_ready`
            count = sum(not token.is_ready() for token in tokens)
            last = runner.programs.last
            if last is not None and (count or run.stopwatch.current == "step"):
                calls = f"has not finished {count} calls of" if count else "computes"
                collectives = _describe_collectives(last[1], last[2])
                lines.append(f"the device {calls} {last[0]}{collectives}")
        if (batch := getattr(loop, "batch", None)) is not None:
            lines.append(describe_tree(batch, "batch"))
        if self._board is not None:
            others = self._board.collect()
            lines += self._board.describe(others)
            stacks += "".join(f"\n\nProcess {i}:\n{text}" for i, text in sorted(others.items()))
        return lines, stacks


class _Board:
    """Positions and stacks that processes show one another through JAX's coordination service,
    which works while a collective hangs.
    """

    def __init__(self, processes: Any) -> None:
        self._index = processes.index
        self._count = processes.count
        self._client = get_client()
        self._shown: Any = None
        self._answered = ""

    def show(self, iteration: int, part: str, since: float) -> None:
        """Show the position of this process if it has changed."""
        if self._shown != (iteration, part):
            self._shown = iteration, part
            text = json.dumps([iteration, part, time.time() + since - time.monotonic()])
            self._client.key_value_set(f"{_BOARD}at/{self._index}", text, allow_overwrite=True)

    def describe(self, stacks: Mapping[int, str]) -> list[str]:
        """Return the positions of the processes, that of the one that lags first, with its line."""
        found = {}
        for key, text in self._client.key_value_dir_get(f"{_BOARD}at/"):
            iteration, part, since = json.loads(text)
            # those in the step wait for the others
            order = iteration, part == "step", since
            seconds = max(time.time() - since, 0)
            place = f"iteration {iteration:,}, in `{part}` for {seconds:.0f} s"
            found[int(key.rsplit("/", 1)[-1])] = order, place
        if not found:
            return []
        lagging = min(found, key=lambda index: found[index][0])
        others = [
            f"process {i}: {place}" for i, (_, place) in sorted(found.items()) if i != lagging
        ]
        own = [f", at {line}" for line in find_own_lines(stacks.get(lagging, ""))]
        return [f"process {lagging} lags: {found[lagging][1]}{''.join(own)}", *others[:_MAX_OTHERS]]

    def answer(self) -> None:
        """Send the stacks of this process if another has asked for them."""
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # nobody has
            name = self._client.key_value_try_get(f"{_BOARD}request")
            if name != self._answered:
                self._answered = name
                text = all_stacks()[:_MAX_SENT]
                self._client.key_value_set(f"{_BOARD}stacks/{name}/{self._index}", text)

    def collect(self) -> dict[int, str]:
        """Return the stacks of the other processes that answer in time."""
        name = f"{self._index}-{time.time_ns()}"
        self._answered = name
        self._client.key_value_set(f"{_BOARD}request", name, allow_overwrite=True)
        end = time.monotonic() + _ANSWER
        while True:
            found = self._client.key_value_dir_get(f"{_BOARD}stacks/{name}/")
            if len(found) >= self._count - 1 or time.monotonic() > end:
                break
            time.sleep(0.2)
        self._client.key_value_delete(f"{_BOARD}stacks/{name}/")
        return {int(key.rsplit("/", 1)[-1]): text for key, text in found}


def answer_name(name: str) -> str:
    """Return the name of the file with the stacks, in the work dir."""
    return f"stacks_{name}.txt"


def _describe_collectives(program: Any, shapes: Any) -> str:
    """Return the collectives of a program, in which processes and devices wait for one another."""
    from jengine.extras.diagnose.expensive import list_collectives

    if shapes is None or jax.device_count() == 1:
        return ""
    name = f"jit_{program.trace(*shapes).fun_name}"  # JAX has kept the trace
    modules = [m for x in jax.devices()[0].client.live_executables() for m in x.hlo_modules()]
    found = [each for m in modules if m.name == name for each in list_collectives(m.to_string())]
    return f", with {list_some(list(dict.fromkeys(found)), _MAX_COLLECTIVES)}" if found else ""
