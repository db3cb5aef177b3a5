"""Handle an error in training: name its iteration, save the completed iterations, and close what the run uses."""

import contextlib
import os
import sys
from collections.abc import Iterator
from typing import Any

import jax

from jengine.config import write_config
from jengine.hooks.checks import NonFiniteLossError
from jengine.logging import log_error, reopen_log_file
from jengine.runner.runner_protocol import Runner, TrainLoop


def is_consistent(runner: Runner) -> bool:
    """Return whether counters, state and hooks agree, so that training can continue or be saved."""
    loop, state = runner.train_loop, runner.state
    if loop is None or state is None:
        return True
    is_usable = loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    return is_usable and (not isinstance(state.step, jax.Array) or int(state.step) == loop.iter)


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
    """Add the iteration to the error, save the completed iterations, and call the hooks' stage `on_failure`."""
    if not any("at iteration" in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in training, at iteration {runner.iter} (epoch {runner.epoch})")
    if not isinstance(error, NonFiniteLossError):  # the parameters may not be finite either
        _save_completed_iterations(runner)
    runner.call_hook("on_failure")


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
    """Close what the run uses at its end. After an error, an error in that is only logged: it would hide the first."""
    try:
        with _ignore_closed_event_loops():
            yield
    except BaseException as error:
        if isinstance(error, Exception):
            log_error(error)
        try:
            close(runner)
        except Exception as second:
            runner.logger.error(f"Closing the run failed as well: {type(second).__name__}: {second}")
        raise
    close(runner)


def close(runner: Runner) -> None:
    """Finish background work, all of it, also if a part fails."""
    with contextlib.ExitStack() as stack:
        stack.callback(runner.visualizer.close)
        stack.callback(runner.log_writer.close)
        with runner.phase_timer.phase("checkpoint"):
            if not runner.processes.failing:
                runner.checkpointer.wait()


def recreate_work_dir(runner: Runner) -> None:
    """Create the directories of a run again, if they were deleted during it, and warn: what follows is kept."""
    if os.path.isdir(runner.log_dir) or not runner.is_main_process:
        return
    runner.log_writer.flush()
    runner.visualizer.close()  # it would continue to write to deleted files
    reopen_log_file(runner.logger)
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
    try:
        runner.log_writer.flush()
    except Exception as error:  # a log that cannot be written must not prevent the save
        runner.logger.error(f"The log could not be written: {type(error).__name__}: {error}")
    try:
        if all_end_here and is_consistent(runner):
            runner.call_hook("on_interrupt")
        else:
            runner.logger.error(f"Training ended within iteration {runner.iter}, which is not saved.")
    except Exception as error:  # it must not hide the error that ended training
        runner.logger.error(f"The completed iterations could not be saved: {type(error).__name__}: {error}")
