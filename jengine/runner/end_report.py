"""Report at the end of a run: the validation table, the speed, and the file paths."""

import os
import signal

from jengine.checkpoint.layout import CorruptCheckpointError, find_latest, read_meta, read_pointer
from jengine.config.plugins import load_each
from jengine.config.storage import StorageError, storage_path
from jengine.evaluation.table import format_validations
from jengine.runner.failures import (
    is_consistent,
    list_directories,
    logged_errors,
    recreate_work_dir,
    wait_for_device,
)
from jengine.runner.runner_protocol import RunnerInternals

# without compiling, validation, checkpoints and setup
_TRAINING_PHASES = ("input", "hooks", "step", "logging")


def log_summary(runner: RunnerInternals) -> None:
    """Log the validations, the speed and the file paths after training.

    The hub gets the time by phase and the speed as well.
    """
    _finish(runner)
    recreate_work_dir(runner)
    scalars, lines = measure_speed(runner)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    _log_summary(runner, "Training is done.", lines)


def log_interruption(runner: RunnerInternals) -> None:
    """Log what is saved after a signal and how to continue, then the same as `log_summary`."""
    if runner.processes.count > 1 and not runner.interrupts.agreed:
        return  # it ends without the other processes
    if not is_consistent(runner):  # a second signal, within an iteration
        runner.logger.warning(f"{_describe_interruption(runner)}\n{list_files(runner)}")
        return
    with logged_errors(runner, "The run could not be completed"):
        _finish(runner)
    if runner.is_main_process:  # the others would only look for the checkpoints, and log nothing
        # The hub does not get the time: a resumed run will record the total
        _log_summary(runner, _describe_interruption(runner), measure_speed(runner)[1])


def _finish(runner: RunnerInternals) -> None:
    """Wait for pending steps, saves and log lines."""
    wait_for_device(runner)
    with runner.stopwatch.part("checkpoint"):
        runner.checkpointer.wait()
    with runner.stopwatch.part("logging"):
        runner.log_writer.flush()


def _log_summary(runner: RunnerInternals, headline: str, speed: list[str]) -> None:
    parts = [headline, *speed, list_files(runner)]
    if runner.validations:
        monitored = [
            (name, rule) for hook in runner.hooks for _, name, rule in hook.monitored_metrics()
        ]
        by_epoch = runner.train_loop.by_epoch
        parts.insert(
            1, format_validations(runner.validations, by_epoch=by_epoch, monitored=monitored)
        )
    runner.logger.info("\n".join(parts))


def _describe_interruption(runner: RunnerInternals) -> str:
    """Return what is saved, and the command that continues the run."""
    signum = runner.interrupts.signum
    reason = (
        f" by {'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name}"
        if signum
        else ""
    )
    if runner.interrupts.reason:
        code = 128 + signal.SIGTERM
        reason = f" by {runner.interrupts.reason}, to be started again (exit code {code})"
    at = f"Interrupted{reason} after iteration {runner.iter}"
    try:
        newest = next(
            (path for path in map(find_latest, list_directories(runner)) if path is not None), None
        )
    except (CorruptCheckpointError, StorageError) as error:
        return f"{at}; {error}"
    if newest is None:
        return f"{at}; nothing is saved: the run has no checkpoint."
    saved = read_meta(newest)["meta"]["iter"]
    lost = f", of iteration {saved}" if saved < runner.iter else ""
    is_default = os.path.dirname(newest) == runner.work_dir
    command = runner.resume_command(None if is_default else newest)
    return f"{at}; saved: {os.path.basename(newest)}{lost}. To continue: {command}"


def list_files(runner: RunnerInternals) -> str:
    """Return the paths of checkpoints, logs and TensorBoard files, one per line."""
    last, _ = read_pointer(storage_path("work_dir", runner.work_dir))
    newest = "" if last is None else f" (last: {last.name})"
    log_dir = os.path.join(runner.work_dir, runner.timestamp)
    vis_dir = os.path.join(log_dir, "vis_data")
    lines = [
        f"checkpoints:  {runner.work_dir}{newest}",
        f"log:          {os.path.join(log_dir, runner.timestamp + '.log')}",
        f"scalars:      {os.path.join(vis_dir, 'scalars.json')}",
    ]
    local = os.path.join(runner.log_dir, "vis_data")
    if os.path.isdir(local) and any("tfevents" in name for name in os.listdir(local)):
        lines.append(f"TensorBoard:  tensorboard --logdir {vis_dir}")
    return "\n".join(lines)


def measure_speed(runner: RunnerInternals) -> tuple[dict[str, float], list[str]]:
    """Return the time by phase and the speed: scalars, and lines for the log.

    Returns:
      'seconds/<phase>' for each phase, which add up to the time since training began; and, over the
      training time only, 'speed/iterations_per_second', 'speed/examples_per_second' if it is known,
      and what extras add.
    """
    seconds = runner.stopwatch.report()
    training = sum(seconds.get(phase, 0.0) for phase in _TRAINING_PHASES)
    speed = runner.iters_this_session / training if training else 0.0
    rates = {}
    if speed:
        rates["iterations_per_second"] = (speed, f"{speed:,.1f} iterations/s")
        if batch_size := runner.train_dataloader.batch_size:
            count = runner.train_loop.batches_per_iteration
            count *= runner.strategy.data_shard.for_axis(runner.train_dataloader.batch_axis).count
            examples = speed * batch_size * count
            rates["examples_per_second"] = (examples, f"{examples:,.0f} examples/s")
    lines = []
    for report in load_each("end_report"):
        more, text = report(runner, seconds, speed)
        rates |= more
        lines += text
    if rates:
        texts = ", ".join(text for _, text in rates.values() if text)
        lines.append(f"{texts}, without compiling, validation and checkpoints")
    scalars = {f"seconds/{phase}": duration for phase, duration in seconds.items()}
    return scalars | {f"speed/{name}": value for name, (value, _) in rates.items()}, lines
