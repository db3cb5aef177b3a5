"""Handle an error in training: name its iteration, and save the completed iterations if they are consistent."""

import jax

from jengine.runner.runner_protocol import Runner


def is_consistent(runner: Runner) -> bool:
    """Return whether counters, state and hooks agree, so that training can continue or be saved."""
    loop, state = runner.train_loop, runner.state
    if loop is None or state is None:
        return True
    is_usable = loop.is_consistent and not any(leaf.is_deleted() for leaf in jax.tree.leaves(state))
    return is_usable and (not isinstance(state.step, jax.Array) or int(state.step) == loop.iter)


def handle_failure(runner: Runner, error: BaseException) -> None:
    """Add the iteration to the error, save the completed iterations, and call the hooks' stage `on_failure`."""
    if not any("at iteration" in note for note in getattr(error, "__notes__", ())):
        error.add_note(f"in training, at iteration {runner.iter} (epoch {runner.epoch})")
    _save_completed_iterations(runner)
    runner.call_hook("on_failure")


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
