"""The course of a run: lock, files, training, a failure or an interrupt, and the end.

`opened` is around all that `train`, `val` and `test` do, `session` around the training loop. After
an error the log says what happened before anything that can wait, and waits for the device, files
and services have a limit: a step that never finishes, or a disk that hangs, must neither hide the
error nor keep the process alive.
"""

import contextlib
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax

from jengine.checkpoint.arrays import ignore_closed_event_loops
from jengine.checkpoint.layout import CURRENT_RUN, POINTER
from jengine.checkpoint.lock_holder import LOCK, WorkDirLockedError
from jengine.config.dump import write_config
from jengine.config.errors import ConfigError, read_seconds
from jengine.config.explain import explain
from jengine.hooks.checks import NonFiniteLossError
from jengine.hooks.run import Run
from jengine.hooks.run_record import GroupTable, start_record, update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.console import log_error, open_log_file
from jengine.parallel.interrupts import watch_waits
from jengine.parallel.strategy import is_pending
from jengine.runner import report
from jengine.runner.loops import check_losses

_LIMIT_VARIABLE = "JENGINE_FAILURE_TIMEOUT"
_LIMIT = read_seconds(_LIMIT_VARIABLE, 300)  # for each wait in a failed run
_ANNOUNCED_AFTER = 1.0  # seconds
_abandoned: list[jax.Array] = []  # not computed when a run stopped waiting for the device


@contextlib.contextmanager
def opened(runner: RunnerProtocol, *, trains: bool) -> Iterator[None]:
    """Open the log, watch the waits for data inside, and finish all background work at the end.

    A training also locks the directories of its checkpoints. With several processes an error ends
    all of them, unless all have agreed to end here.
    """
    run = runner.run
    try:
        with ignore_closed_event_loops(), watch_waits(run.interrupts, run.logger), abort_all(run):
            if trains:
                run.directories.lock()
            _open_files(run)
            yield
    except BaseException as error:
        if isinstance(error, Exception):
            log_error(error)
        with logged_errors(run, "Closing the run failed as well"):
            # A device that does not finish would block the thread that writes the log. Several end
            # each other.
            if run.processes.count > 1 or device_finishes(run, runner.state):
                close(run, is_limited=True)
        raise
    else:
        close(run)
    finally:
        if trains:
            run.directories.unlock()


@contextlib.contextmanager
def session(runner: RunnerProtocol, groups: GroupTable) -> Iterator[None]:
    """Log and record the start and the end of training, which runs inside: complete, or by an
    error or a signal.
    """
    run = runner.run
    report.log_start(runner, groups)  # before the files of other runs are moved: it may refuse
    if run.is_main_process:
        for moved in run.directories.claim():
            run.logger.warning(f"The checkpoints of another run are now in {moved}.")
    start_record(runner, groups)
    first = runner.iter
    elapsed = sum(run.stopwatch.report().values())  # since the call of `train`
    with run.interrupts:
        try:
            max_time = getattr(runner.train_loop, "max_time", None)  # a loop of the user has none
            with run.interrupts.limit_time(max_time, elapsed):
                yield
            check_losses(runner, at_end=True)  # those that no log line has fetched
        except BaseException as error:
            signum = run.interrupts.signum
            cause = signal.Signals(signum).name if signum else type(error).__name__
            update_record(runner, f"stopped by {cause}")
            _handle_failure(runner, error, has_trained=runner.iter > first)
            if isinstance(error, KeyboardInterrupt | SystemExit):
                _log_interruption(runner, first)
            raise
        finally:
            runner.programs.follow_model(end=True)
    _finish(run)
    recreate_work_dir(run, runner.iter)
    report.log_end(runner, runner.iter - first)
    update_record(runner, "finished")


# --- Files ---


def _open_files(run: Run) -> None:
    """Create the log file and config.py, or continue those of the run that this one resumes."""
    if run.resume_from is not None and run.is_main_process:
        run.files.fetch(run.timestamp, skip=(LOCK, POINTER, CURRENT_RUN))
    run.files.start()
    try:
        open_log_file(run.logger, run.log_file)
        if run.described.cfg_text and run.is_main_process:
            write_config(run.described.cfg_text, os.path.join(run.local_dir, "config.py"))
            run.visualizer.add_config(run.described.cfg_text)
    except OSError as error:
        raise ConfigError(f"`work_dir` must be writable, got {run.work_dir}: {error}") from error


def recreate_work_dir(run: Run, iteration: int) -> None:
    """Create the run's directories again, and warn, if they were deleted meanwhile: later files
    are kept.
    """
    if os.path.isdir(run.log_dir) or not run.is_main_process:
        return
    run.log_writer.flush()
    run.visualizer.close()  # it would continue to write to deleted files
    _open_files(run)
    run.logger.warning(
        f"{run.log_dir} was deleted during the run, before iteration {iteration}: it is "
        "created again, without the logs and checkpoints that were deleted."
    )


def close(run: Run, is_limited: bool = False) -> None:
    """Finish all background work, even if a part fails.

    `is_limited` sets a time limit for logs, but not for saves.
    """

    def close_logs() -> None:
        with contextlib.ExitStack() as closed:  # in reverse order, each also if another fails
            closed.callback(run.files.close, keep=is_limited)
            closed.callback(run.visualizer.close)
            run.log_writer.close()

    with contextlib.ExitStack() as stack:
        if is_limited:
            stack.callback(_run_within_limit, close_logs, run, "logs")
        else:
            stack.callback(close_logs)
        with run.stopwatch.part("checkpoint"):
            if not run.processes.failing:
                run.checkpointer.wait()


def _finish(run: Run) -> None:
    """Wait for pending steps, saves and log lines."""
    run.wait_for_device()
    with run.stopwatch.part("checkpoint"):
        run.checkpointer.wait()
    with run.stopwatch.part("logging"):
        run.log_writer.flush()


# --- Failures and interrupts ---


@contextlib.contextmanager
def abort_all(run: Run) -> Iterator[None]:
    """End all processes on an error inside, unless all have agreed to end here."""
    try:
        yield
    except BaseException as error:
        if not run.interrupts.agreed:
            run.processes.fail(error)
        raise


def _handle_failure(runner: RunnerProtocol, error: BaseException, *, has_trained: bool) -> None:
    """Name the iteration in the error, log it, save the completed iterations, and call the
    stage `on_failure`.
    """
    run = runner.run
    explain(error, run=runner, cfg=run.cfg)
    is_loss = isinstance(error, NonFiniteLossError)  # whose message names the iteration
    if not is_loss and not any("at iteration" in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in training, at iteration {runner.iter} (epoch {runner.epoch})")
    if isinstance(error, Exception):
        summary = f"Training stops at iteration {runner.iter} with {type(error).__name__}"
        # The terminal shows the message once, where the process ends
        run.logger.error(
            f"{summary}: {str(error).partition(chr(10))[0]}", extra={"on_terminal": f"{summary}."}
        )
        log_error(error)
    # Nothing is new, parameters may not be finite, or another run may have taken over
    if has_trained and not isinstance(error, NonFiniteLossError | WorkDirLockedError):
        _save_completed_iterations(runner)
    with logged_errors(run, "A hook failed after that as well"):
        runner.call_hook("on_failure")


@contextlib.contextmanager
def logged_errors(run: Run, what: str) -> Iterator[None]:
    """Only log an error inside: it must not hide the one that ended training."""
    try:
        yield
    except Exception as error:
        run.logger.error(f"{what}: {type(error).__name__}: {error}")


def _save_completed_iterations(runner: RunnerProtocol) -> None:
    """Save the completed iterations, unless the error came within one, so that counters, state
    and hooks disagree.
    """
    run = runner.run
    # Several processes save together, so they can save only if all of them end here
    all_end_here = run.processes.count == 1 or run.interrupts.agreed
    if all_end_here and not device_finishes(run, runner.state):
        return
    with logged_errors(run, "The log could not be written"):  # which must not prevent the save
        if not _run_within_limit(run.log_writer.flush, run, "logs"):
            return
    with logged_errors(run, "The completed iterations could not be saved"):
        if all_end_here and is_consistent(runner):
            runner.call_hook("on_interrupt")
        else:
            text = f"Training ended within iteration {runner.iter}, which is not saved."
            run.logger.error(text, extra={"on_terminal": text})


def _log_interruption(runner: RunnerProtocol, first: int) -> None:
    """Log what is saved after a signal and how to continue, then the same as at the end."""
    run = runner.run
    if run.processes.count > 1 and not run.interrupts.agreed:
        return  # it ends without the other processes
    if not is_consistent(runner):  # a second signal, within an iteration
        run.logger.warning(f"{report.describe_interruption(runner)}\n{report.list_files(run)}")
        return
    with logged_errors(run, "The run could not be completed"):
        _finish(run)
    report.log_interruption(runner, runner.iter - first)


# --- Whether training can continue or be saved ---


def check_consistent(runner: RunnerProtocol) -> None:
    """Raise RuntimeError if an error in an earlier call of `train` left an inconsistent run."""
    if not is_consistent(runner):
        raise RuntimeError(
            f"training cannot continue: it stopped with an error at iteration {runner.iter}, and "
            "counters, state and hooks disagree; start from a checkpoint: Runner(..., resume=True)"
        )


def is_consistent(runner: RunnerProtocol) -> bool:
    """Return whether counters, state and hooks agree, so that training can continue or be saved."""
    run = runner.run
    loop = runner.train_loop
    state = runner.state
    if loop is None or state is None:
        return True
    is_usable = loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    if not is_usable or not isinstance(state.step, jax.Array):
        return is_usable
    is_done = device_finishes(run, state) and not step_failed(run, state)
    return is_done and int(state.step) == loop.iter


def device_finishes(run: Run, state: Any) -> bool:
    """Wait until the device has finished all steps.

    Return False after the limit, at once in later calls.
    """
    start = time.monotonic()
    is_announced = False
    while pending := _find_pending(run, state):
        if any(array is abandoned for array in pending for abandoned in _abandoned):
            return False
        elapsed = time.monotonic() - start
        if elapsed >= _LIMIT:
            run.logger.error(
                f"The device has not finished the steps within {_LIMIT:g} s ({_LIMIT_VARIABLE}): "
                "what they compute is not saved."
            )
            if not _abandoned:
                _end_without(lambda: any(map(is_pending, _abandoned)), run)
            _abandoned.extend(pending)
            return False
        if elapsed >= _ANNOUNCED_AFTER and not is_announced:
            is_announced = True
            run.logger.info(f"Waiting for the device to finish, at most {_LIMIT:g} s.")
        time.sleep(0.01)  # JAX has no wait with a limit
    return True


def _find_pending(run: Run, state: Any) -> list[jax.Array]:
    """Return arrays in the state, and step outputs, that the device has not computed."""
    pending = [
        array
        for array in jax.tree.leaves(state)
        if isinstance(array, jax.Array) and is_pending(array)
    ]
    return [*pending, *run.limiter.find_unfinished()]


def step_failed(run: Run, state: Any, limit: float = 0) -> bool:
    """Return whether a training step or the creation of the state failed on the device.

    Wait `limit` s at most.
    """
    deadline = time.monotonic() + limit
    while True:
        pending = _find_pending(run, state)
        try:
            for array in jax.tree.leaves(state):
                if (
                    isinstance(array, jax.Array)
                    and not array.is_deleted()
                    and not is_pending(array)
                ):
                    array.block_until_ready()
        except jax.errors.JaxRuntimeError:
            return True
        if not pending or time.monotonic() >= deadline:
            return False
        time.sleep(0.01)


def _run_within_limit(job: Callable[[], object], run: Run, what: str) -> bool:
    """Run `job` in a thread, and return whether it finished within the limit."""
    errors: list[Exception] = []

    def call() -> None:
        try:
            job()
        except Exception as error:
            errors.append(error)

    # must not keep the process
    thread = threading.Thread(target=call, name="jengine-close", daemon=True)
    thread.start()
    thread.join(min(_LIMIT, _ANNOUNCED_AFTER))
    if thread.is_alive() and _LIMIT > _ANNOUNCED_AFTER:
        run.logger.info(f"Waiting for {what}, at most {_LIMIT:g} s.")
        thread.join(_LIMIT - _ANNOUNCED_AFTER)
    if thread.is_alive():
        run.logger.error(
            f"{what.capitalize()} were not finished within {_LIMIT:g} s ({_LIMIT_VARIABLE}): the "
            "run ends without them."
        )
        _end_without(thread.is_alive, run)
        return False
    if errors:
        raise errors[0]
    return True


def _end_without(is_waiting: Callable[[], bool], run: Run) -> None:
    """Let the process end with the main thread although something never answers."""
    code = 128 + signum if (signum := run.interrupts.signum) else 1

    def end() -> None:
        if is_waiting():
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)  # without the waits of a normal exit

    # Not `atexit`: the interpreter waits for executors' threads before it, and for the device after
    # it, both forever
    # As concurrent.futures, which it precedes
    threading._register_atexit(end)  # type: ignore[attr-defined]
