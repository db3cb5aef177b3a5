"""Failures of training: an error is shown, its iteration named, completed iterations are saved, and the run is closed.

The error is shown before anything that can wait. Waits for the device, for files and for services end after a limit: a
step that never finishes, or a disk that hangs, must not hide the error, nor keep the process from ending.
"""

import contextlib
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoint import CheckpointSaveError, list_checkpoints
from jengine.checkpoint.manifest import read_manifest
from jengine.config import write_config
from jengine.errors import read_seconds
from jengine.hooks.checks import NonFiniteLossError
from jengine.logging import log_error, open_log_file
from jengine.optim import AmpOptimWrapper
from jengine.runner.interrupts import watch_waits
from jengine.runner.runner_protocol import Runner, TrainLoop
from jengine.sharding.strategy import is_pending
from jengine.train.out_of_memory import explain_out_of_memory


def check_losses(runner: Runner, *, at_line: bool = False, at_end: bool = False) -> None:
    """Check the losses that were fetched since the last call, as `train_cfg.on_nonfinite` requires.

    Args:
      runner: in training; elsewhere nothing is checked.
      at_line: at a log line, where several processes check the losses up to the previous line, so that all of them stop
        at the same iteration; elsewhere they fetch all losses.
      at_end: training has ended: fetch all losses that are left.

    Raises:
      NonFiniteLossError: a loss is not finite, of a step that no loss scale and no hook has dropped.
    """
    loop, hub = runner.train_loop, runner.message_hub
    if loop is None or hub.losses is None:
        return
    last: float = math.inf
    if at_line and runner.processes.count > 1:
        runner.log_writer.flush()
        last = hub.last_snapshot
    elif at_end or runner.processes.count > 1:
        hub.flush()
    wrapper = runner.optim_wrapper
    has_scale = isinstance(wrapper, AmpOptimWrapper) and wrapper.loss_scale is not None
    found = hub.losses.pop(last, waits=has_scale and wrapper.accumulates and not at_end)
    if found is None:
        return
    iteration, value = found
    if loop.on_nonfinite == "warn":
        hub.losses = None
        runner.logger.warning(f"The loss of iteration {iteration}, counted from 0, is {value}; training continues.")
        return
    path = _find_checkpoint_before(runner, iteration)
    newest = f"The newest checkpoint from before it is {path}" if path else "There is no checkpoint from before it"
    raise NonFiniteLossError(
        f"the loss of iteration {iteration}, counted from 0, is {value} (train_cfg.on_nonfinite='warn' or 'ignore' "
        f"continues). {newest}. To train from {'there' if path else 'scratch'} with the numerics guard, which drops "
        f"such steps, and after several in a row writes one for `jengine replay`:\n"
        f"  {runner.resume_command(path or '', guard=True)}"
    )


def _find_checkpoint_before(runner: Runner, iteration: int) -> str | None:
    """Return the newest checkpoint of this run whose parameters are those of a step before that of `iteration`."""
    if runner.processes.count == 1:  # several would have to wait together
        with contextlib.suppress(CheckpointSaveError):
            runner.checkpointer.wait()
    directories = [runner.work_dir, *(path for hook in runner.hooks for path in hook.list_directories(runner.work_dir))]
    paths = (path for directory in directories if Path(directory).is_dir() for path in list_checkpoints(directory))
    manifests = {path: read_manifest(Path(path)) for path in paths}
    # the step that starts from a checkpoint, and computes the first loss with it, is that of the checkpoint's number
    found = [
        (manifest.iteration, manifest.is_latest, path)
        for path, manifest in manifests.items()
        if manifest is not None and manifest.is_complete and manifest.run == runner.run_id
        if manifest.iteration is not None and manifest.iteration < iteration
    ]
    return max(found)[2] if found else None


_LIMIT_VARIABLE = "JENGINE_FAILURE_TIMEOUT"
_LIMIT = read_seconds(_LIMIT_VARIABLE, 300)  # of the waits of a failed run
_ANNOUNCED_AFTER = 1.0  # seconds
_abandoned: list[jax.Array] = []  # what the device had not computed when a run stopped waiting for it


def is_consistent(runner: Runner) -> bool:
    """Return whether counters, state and hooks agree, so that training can continue or be saved."""
    loop, state = runner.train_loop, runner.state
    if loop is None or state is None:
        return True
    is_usable = loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    if not is_usable or not isinstance(state.step, jax.Array):
        return is_usable
    return device_finishes(runner) and not step_failed(runner) and int(state.step) == loop.iter


def device_finishes(runner: Runner) -> bool:
    """Wait until the device has finished all steps; return False if it takes too long, at once in later calls."""
    start, is_announced = time.monotonic(), False
    while pending := _find_pending(runner):
        if any(array is abandoned for array in pending for abandoned in _abandoned):
            return False
        elapsed = time.monotonic() - start
        if elapsed >= _LIMIT:
            runner.logger.error(
                f"The device has not finished the steps before iteration {runner.iter} within {_LIMIT:g} s "
                f"({_LIMIT_VARIABLE}): what they compute is not saved."
            )
            if not _abandoned:
                _end_without(lambda: any(map(is_pending, _abandoned)), runner)
            _abandoned.extend(pending)
            return False
        if elapsed >= _ANNOUNCED_AFTER and not is_announced:
            is_announced = True
            runner.logger.info(f"Waiting for the device to finish, at most {_LIMIT:g} s.")
        time.sleep(0.01)
    return True


def step_failed(runner: Runner) -> bool:
    """Return whether the device failed in a training step, or in the creation of the state, whatever waited for it."""
    try:
        for array in jax.tree.leaves(runner.state):
            if isinstance(array, jax.Array) and not array.is_deleted() and not is_pending(array):
                array.block_until_ready()
    except jax.errors.JaxRuntimeError:
        return True
    return False


def _find_pending(runner: Runner) -> list[jax.Array]:
    """Return arrays of the state, and outputs of steps, that the device has not computed."""
    pending = [array for array in jax.tree.leaves(runner.state) if isinstance(array, jax.Array) and is_pending(array)]
    return [*pending, *runner.dispatch_limiter.find_unfinished()]


def _end_without(is_waiting: Callable[[], bool], runner: Runner) -> None:
    """Let the process end with its main thread although something never answers.

    The interpreter would wait forever: for the threads of executors before it calls the functions of `atexit`, for the
    device after these.
    """
    code = 128 + signum if (signum := runner.interrupts.signum) else 1

    def end() -> None:
        if is_waiting():
            logging.shutdown()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    threading._register_atexit(end)  # type: ignore[attr-defined]  # as concurrent.futures, which it precedes


def _run_within_limit(job: Callable[[Runner], object], runner: Runner, what: str) -> bool:
    """Run `job(runner)` in a thread, and return whether it finished within the limit."""
    errors: list[Exception] = []

    def run() -> None:
        try:
            job(runner)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=run, name="jengine-close", daemon=True)
    thread.start()
    thread.join(min(_LIMIT, _ANNOUNCED_AFTER))
    if thread.is_alive() and _LIMIT > _ANNOUNCED_AFTER:
        runner.logger.info(f"Waiting for {what}, at most {_LIMIT:g} s.")
        thread.join(_LIMIT - _ANNOUNCED_AFTER)
    if thread.is_alive():
        runner.logger.error(
            f"{what.capitalize()} were not finished within {_LIMIT:g} s ({_LIMIT_VARIABLE}): the run ends without."
        )
        _end_without(thread.is_alive, runner)
        return False
    if errors:
        raise errors[0]
    return True


def check_consistent(runner: Runner, failure: str) -> None:
    """Check that training can continue after an earlier call of `train` that stopped at the point `failure`.

    Raises:
      RuntimeError: counters, state and hooks disagree.
    """
    if not is_consistent(runner):
        raise RuntimeError(
            f"training cannot continue: it stopped {failure}, and counters, state and hooks disagree; "
            "start from a checkpoint: Runner(..., resume=True)"
        )


def handle_failure(runner: Runner, error: BaseException) -> None:
    """Name the iteration in the error, show it, save the completed iterations, and call the stage `on_failure`.

    A run that was refused before its first step has nothing to save.
    """
    runner.programs.explain_out_of_memory(error, noticed=step_failed(runner))
    explain_out_of_memory(error, "a program other than the training step")
    if not any("at iteration" in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in training, at iteration {runner.iter} (epoch {runner.epoch})")
    if isinstance(error, Exception):
        summary = str(error).partition("\n")[0]
        runner.logger.error(f"Training stops at iteration {runner.iter} with {type(error).__name__}: {summary}")
        log_error(error)
    if runner.files.exist and not isinstance(error, NonFiniteLossError):  # its parameters may not be finite either
        _save_completed_iterations(runner)
    try:
        runner.call_hook("on_failure")
    except Exception as second:  # it must not hide the first
        runner.logger.error(f"A hook failed after that as well: {type(second).__name__}: {second}")


@contextlib.contextmanager
def mark_inconsistent(loop: TrainLoop | None) -> Iterator[None]:
    """Mark the counters, state and hooks of training as inconsistent inside, and permanently after an error."""
    if loop is None:
        yield
        return
    before, loop.is_consistent = loop.is_consistent, False
    yield
    loop.is_consistent = before


@contextlib.contextmanager
def closing(runner: Runner) -> Iterator[None]:
    """Watch the waits for data inside, and close what the run uses at its end.

    After an error, an error in that is only logged: it would hide the first, and so would a wait without an end.
    """
    try:
        with _ignore_closed_event_loops(), watch_waits(runner.interrupts, runner.logger):
            yield
    except BaseException as error:
        if isinstance(error, Exception):
            log_error(error)
        try:
            # A device that does not finish would block the thread that writes the log. Several end each other.
            if runner.processes.count > 1 or device_finishes(runner):
                close(runner, is_limited=True)
        except Exception as second:
            runner.logger.error(f"Closing the run failed as well: {type(second).__name__}: {second}")
        raise
    close(runner)


def close(runner: Runner, is_limited: bool = False) -> None:
    """Finish background work, all of it, also if a part fails.

    Args:
      runner: the runner.
      is_limited: whether logs and the visualizer's backends end after a limit. A save may take any time.
    """
    with contextlib.ExitStack() as stack:
        if is_limited:
            stack.callback(_run_within_limit, _close_logs, runner, "logs")
        else:
            stack.callback(_close_logs, runner)
        with runner.phase_timer.phase("checkpoint"):
            if not runner.processes.failing:
                runner.checkpointer.wait()


def _close_logs(runner: Runner) -> None:
    try:
        runner.log_writer.close()
    finally:
        runner.visualizer.close()


def recreate_work_dir(runner: Runner) -> None:
    """Create the directories of a run again, if they were deleted during it, and warn: what follows is kept."""
    if os.path.isdir(runner.log_dir) or not runner.is_main_process:
        return
    runner.log_writer.flush()
    runner.visualizer.close()  # it would continue to write to deleted files
    open_log_file(runner.logger)
    if runner.cfg_text:
        write_config(runner.cfg_text, os.path.join(runner.work_dir, "config.py"))
    runner.logger.warning(
        f"{runner.log_dir} was deleted during the run, before iteration {runner.iter}: it is created again, "
        "without the logs and checkpoints that were deleted."
    )


@contextlib.contextmanager
def _ignore_closed_event_loops() -> Iterator[None]:
    """Drop the tracebacks of threads that still report to the event loop of a failed save; the save has its own error.

    The threads are TensorStore's, which Python calls with errors that it cannot raise.
    """
    previous = sys.unraisablehook

    def report(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = previous


def _save_completed_iterations(runner: Runner) -> None:
    """Save the completed iterations after an error or a signal, if counters, state and hooks agree.

    They disagree after an error within an iteration; then nothing is saved. Several processes save together, so they
    save only if all of them end here.
    """
    all_end_here = runner.processes.count == 1 or runner.interrupts.agreed
    if all_end_here and not device_finishes(runner):
        return
    try:
        if not _run_within_limit(lambda runner: runner.log_writer.flush(), runner, "logs"):
            return
    except Exception as error:  # a log that cannot be written must not prevent the save
        runner.logger.error(f"The log could not be written: {type(error).__name__}: {error}")
    try:
        if all_end_here and is_consistent(runner):
            runner.call_hook("on_interrupt")
        else:
            runner.logger.error(f"Training ended within iteration {runner.iter}, which is not saved.")
    except Exception as error:  # it must not hide the error that ended training
        runner.logger.error(f"The completed iterations could not be saved: {type(error).__name__}: {error}")
