"""The course of a run: lock, files, training, a failure or an interrupt, and the end.

`opened` is around all that `train`, `val` and `test` do, `session` around the training loop. After
an error the log says what happened before anything that can wait, and waits for the device, files
and services end the process after the watchdog's limit: a step that never finishes, or a disk that
hangs, must neither hide the error nor keep the process alive.
"""

import contextlib
import os
import signal
from collections.abc import Iterator

import jax

from jengine.checkpoint.layout import CURRENT_RUN, POINTER, read_current_run
from jengine.checkpoint.lock_holder import LOCK, WorkDirLockedError
from jengine.checkpoint.orbax import ignore_closed_event_loops
from jengine.config.dump import write_config
from jengine.config.errors import ConfigError
from jengine.config.explain import explain
from jengine.config.storage import storage_path
from jengine.hooks.run import Run
from jengine.hooks.run_record import GroupTable, start_record, update_record
from jengine.hooks.runner_protocol import RunnerProtocol
from jengine.logging.console import log_error, open_log_file
from jengine.logging.loss_watch import NonFiniteLossError
from jengine.logging.watchdog import Wait
from jengine.runner import report
from jengine.runner.loops import check_losses
from jengine.train.state import TrainState


@contextlib.contextmanager
def opened(runner: RunnerProtocol, *, trains: bool) -> Iterator[None]:
    """Open the log, and finish all background work at the end.

    A training also locks the directories of its checkpoints. With several processes an error ends
    all of them, unless all have agreed to end here.
    """
    run = runner.run
    try:
        with ignore_closed_event_loops(), abort_all(run):
            if trains:
                run.directories.lock()
            _open_files(run, trains=trains)
            yield
    except BaseException as error:
        if isinstance(error, Exception):
            log_error(error)
        with logged_errors(run, "Closing the run failed as well"):
            close(run, error)
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
            settings = getattr(runner.train_loop, "settings", None)  # a loop of the user has none
            max_time = getattr(settings, "max_time", None)
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


def _open_files(run: Run, *, trains: bool = True) -> None:
    """Create the log file and config.py, or continue those of the run that this one resumes.

    The config.py in the work dir is that of its training: a test writes one where none was.
    """
    if run.resume_from is not None and run.is_main_process:
        run.files.fetch(run.timestamp, skip=(LOCK, POINTER, CURRENT_RUN))
    run.files.start()
    try:
        open_log_file(run.logger, run.log_file)
        if run.described.cfg_text and run.is_main_process:
            path = os.path.join(run.local_dir, "config.py")
            if trains or read_current_run(storage_path("work_dir", run.work_dir)) is None:
                write_config(run.described.cfg_text, path)
            run.visualizer.add_config(run.described.cfg_text)
    except OSError as error:
        raise ConfigError(f"`work_dir` must be writable, got {run.work_dir}: {error}") from error
    while run.notes:
        run.logger.info(run.notes.pop(0), extra={"on_terminal": ""})


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


def close(run: Run, error: BaseException | None = None) -> None:
    """Finish all background work, even if a part fails.

    With an `error` the process ends after the watchdog's limit for logs; saves have none.
    """
    wait = Wait("the log", error=error)
    with contextlib.ExitStack() as stack:  # in reverse order, each also if another fails
        stack.push(wait)
        stack.callback(run.files.close, keep=error is not None)
        stack.callback(run.visualizer.close)
        stack.callback(run.log_writer.close)
        stack.callback(wait.__enter__)
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
        _save_completed_iterations(runner, error)
    with logged_errors(run, "A hook failed after that as well"):
        runner.call_hook("on_failure")


@contextlib.contextmanager
def logged_errors(run: Run, what: str) -> Iterator[None]:
    """Only log an error inside: it must not hide the one that ended training."""
    try:
        yield
    except Exception as error:
        run.logger.error(f"{what}: {type(error).__name__}: {error}")


def _save_completed_iterations(runner: RunnerProtocol, error: BaseException) -> None:
    """Save the completed iterations, unless the error came within one, so that counters, state
    and hooks disagree.
    """
    run = runner.run
    # Several processes save together, so they can save only if all of them end here
    all_end_here = run.processes.count == 1 or run.interrupts.agreed
    if all_end_here:
        step_failed(runner.state, error)
    with logged_errors(run, "The log could not be written"), Wait("the log", error=error):
        run.log_writer.flush()
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


def is_consistent(runner: RunnerProtocol) -> bool:
    """Return whether counters, state and hooks agree, so that training can continue or be saved."""
    loop = runner.train_loop
    state = runner.state
    if loop is None or state is None:
        return True
    is_usable = loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    if not is_usable or not isinstance(state.step, jax.Array):
        return is_usable
    return not step_failed(state) and int(state.step) == loop.iter


def step_failed(state: TrainState, error: BaseException | None = None) -> bool:
    """Wait until the device has finished all steps; return whether one, or the creation of the
    state, failed.

    With an `error` the process ends after the watchdog's limit.
    """
    arrays = [
        leaf
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
    ]
    try:
        with Wait("the device", error=error):
            jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError:
        return True
    return False
