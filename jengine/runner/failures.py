"""Failures in training: the error is shown with the iteration, completed iterations are saved, and
the run is closed.

The error comes before anything that can wait, and waits for the device, files and services end the
process after the watchdog's limit: a step that never finishes, or a disk that hangs, must neither
hide the error nor keep the process alive.
"""

import contextlib
import math
import os
from collections.abc import Iterator

import jax

from jengine.checkpoint.lock_holder import WorkDirLockedError
from jengine.checkpoint.orbax import ignore_closed_event_loops
from jengine.config.dump import write_config
from jengine.config.explain import explain
from jengine.hooks.checks import NonFiniteLossError
from jengine.logging.console import log_error, open_log_file
from jengine.logging.watchdog import Wait
from jengine.runner.runner_protocol import RunnerInternals, TrainLoopInternals

# --- Losses ---


def check_losses(runner: RunnerInternals, *, at_line: bool = False, at_end: bool = False) -> None:
    """Check the losses that were fetched since the last call, as `train_cfg.on_nonfinite` requires.

    Args:
      runner: outside training nothing is checked.
      at_line: at a log line, where several processes check only up to the previous line, so that
        all stop at the same iteration; elsewhere they fetch all losses.
      at_end: training has ended: fetch all losses that are left.

    Raises:
      NonFiniteLossError: a loss is not finite in a step that no loss scale and no hook has dropped.
    """
    loop = runner.train_loop
    hub = runner.message_hub
    if loop is None or hub.losses is None:
        return
    last: float = math.inf
    if at_line and runner.processes.count > 1:
        runner.log_writer.flush()
        last = hub.last_snapshot  # the same line on all processes
    elif at_end or runner.processes.count > 1:
        hub.flush()
    wrapper = runner.optim_wrapper
    has_scale = getattr(wrapper, "loss_scale", None) is not None
    # At the end too: a resumed run finishes the window, and the loss scale drops it then.
    found = hub.losses.pop(last, waits=has_scale and wrapper.accumulates)
    if found is None:
        return
    iteration, value = found
    if loop.settings.on_nonfinite == "warn":
        hub.losses = None
        runner.logger.warning(
            f"The loss of iteration {iteration}, counted from 0, is {value}; training continues."
        )
        return
    error = NonFiniteLossError(
        f"the loss of iteration {iteration}, counted from 0, is {value} (noticed at iteration "
        f"{loop.iter})"
    )
    error.iteration = iteration
    raise error


def list_directories(runner: RunnerInternals) -> list[str]:
    """Return the work dir and the other directories to which hooks write checkpoints."""
    others = (path for hook in runner.hooks for path in hook.list_directories(runner.work_dir))
    return [runner.work_dir, *others]


# --- Whether training can continue or be saved ---


def is_consistent(runner: RunnerInternals) -> bool:
    """Return whether counters, state and hooks agree, so that training can continue or be saved."""
    loop = runner.train_loop
    state = runner.state
    if loop is None or state is None:
        return True
    is_usable = loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    if not is_usable or not isinstance(state.step, jax.Array):
        return is_usable
    return not step_failed(runner) and int(state.step) == loop.iter


def check_consistent(runner: RunnerInternals, failure: str) -> None:
    """Raise RuntimeError if an earlier call of `train` that stopped at `failure` left an
    inconsistent run.
    """
    if not is_consistent(runner):
        raise RuntimeError(
            f"training cannot continue: it stopped {failure}, and counters, state and hooks "
            "disagree; start from a checkpoint: Runner(..., resume=True)"
        )


@contextlib.contextmanager
def mark_inconsistent(loop: TrainLoopInternals | None) -> Iterator[None]:
    """Mark the counters, state and hooks as inconsistent inside, and permanently after an error."""
    if loop is None:
        yield
        return
    before = loop.is_consistent
    loop.is_consistent = False
    yield
    loop.is_consistent = before


def step_failed(runner: RunnerInternals, error: BaseException | None = None) -> bool:
    """Wait until the device has finished all steps; return whether one, or the creation of the
    state, failed.

    With an `error` the process ends after the watchdog's limit.
    """
    arrays = [
        leaf
        for leaf in jax.tree.leaves(runner.state)
        if isinstance(leaf, jax.Array) and not leaf.is_deleted()
    ]
    try:
        with Wait("the device", error=error):
            jax.block_until_ready(arrays)
    except jax.errors.JaxRuntimeError:
        return True
    return False


# --- The end of a failed run ---


def handle_failure(runner: RunnerInternals, error: BaseException) -> None:
    """Name the iteration in the error, show it, save the completed iterations, and call the
    stage `on_failure`.
    """
    explain(error, run=runner, cfg=runner.cfg)
    is_loss = isinstance(error, NonFiniteLossError)  # whose message names the iteration
    if not is_loss and not any("at iteration" in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in training, at iteration {runner.iter} (epoch {runner.epoch})")
    if isinstance(error, Exception):
        summary = f"Training stops at iteration {runner.iter} with {type(error).__name__}"
        # The terminal shows the message once, where the process ends
        runner.logger.error(
            f"{summary}: {str(error).partition(chr(10))[0]}", extra={"on_terminal": f"{summary}."}
        )
        log_error(error)
    # A run that was refused has nothing to save, parameters may not be finite, or another run may
    # have taken over.
    if runner.files.exist and not isinstance(error, NonFiniteLossError | WorkDirLockedError):
        _save_completed_iterations(runner, error)
    with logged_errors(runner, "A hook failed after that as well"):
        runner.call_hook("on_failure")


@contextlib.contextmanager
def logged_errors(runner: RunnerInternals, what: str) -> Iterator[None]:
    """Only log an error inside: it must not hide the one that ended training."""
    try:
        yield
    except Exception as error:
        runner.logger.error(f"{what}: {type(error).__name__}: {error}")


def _save_completed_iterations(runner: RunnerInternals, error: BaseException) -> None:
    """Save the completed iterations, unless the error came within one, so that counters, state
    and hooks disagree.
    """
    # Several processes save together, so they can save only if all of them end here
    all_end_here = runner.processes.count == 1 or runner.interrupts.agreed
    if all_end_here:
        step_failed(runner, error)
    with logged_errors(runner, "The log could not be written"), Wait("the log", error=error):
        runner.log_writer.flush()
    with logged_errors(runner, "The completed iterations could not be saved"):
        if all_end_here and is_consistent(runner):
            runner.call_hook("on_interrupt")
        else:
            text = f"Training ended within iteration {runner.iter}, which is not saved."
            runner.logger.error(text, extra={"on_terminal": text})


@contextlib.contextmanager
def closing(runner: RunnerInternals) -> Iterator[None]:
    """Close the run's resources at the end."""
    try:
        with ignore_closed_event_loops():
            yield
    except BaseException as error:
        if isinstance(error, Exception):
            log_error(error)
        with logged_errors(runner, "Closing the run failed as well"):
            close(runner, error)
        raise
    close(runner)


def close(runner: RunnerInternals, error: BaseException | None = None) -> None:
    """Finish all background work, even if a part fails.

    With an `error` the process ends after the watchdog's limit for logs; saves have none.
    """
    wait = Wait("the log", error=error)
    with contextlib.ExitStack() as stack:  # in reverse order, each also if another fails
        stack.push(wait)
        stack.callback(runner.files.close, keep=error is not None)
        stack.callback(runner.visualizer.close)
        stack.callback(runner.log_writer.close)
        stack.callback(wait.__enter__)
        with runner.stopwatch.part("checkpoint"):
            if not runner.processes.failing:
                runner.checkpointer.wait()


def recreate_work_dir(runner: RunnerInternals) -> None:
    """Create the run's directories again, and warn, if they were deleted meanwhile: later files
    are kept.
    """
    if os.path.isdir(runner.log_dir) or not runner.is_main_process:
        return
    runner.log_writer.flush()
    runner.visualizer.close()  # it would continue to write to deleted files
    open_log_file(runner.logger)
    if runner.cfg_text:
        write_config(runner.cfg_text, os.path.join(runner.local_dir, "config.py"))
    runner.logger.warning(
        f"{runner.log_dir} was deleted during the run, before iteration {runner.iter}: it is "
        "created again, without the logs and checkpoints that were deleted."
    )


def wait_for_device(runner: RunnerInternals) -> None:
    """Wait until all dispatched steps are finished.

    The time counts as 'step', whatever the caller waits for.
    """
    with runner.stopwatch.part("step"):
        runner.dispatch_limiter.drain()
