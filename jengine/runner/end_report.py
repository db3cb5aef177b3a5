"""Report at the end of a run: the validation table, the time by phase, the speed, and the file
paths.
"""

import os
import signal
from collections.abc import Mapping
from typing import Any

from jengine.checkpoint.layout import CorruptCheckpointError, find_latest, read_meta, read_pointer
from jengine.config.storage import StorageError, storage_path
from jengine.evaluation.table import format_validations
from jengine.hooks.run_record import read_sessions, update_record
from jengine.logging.goodput import Goodput, measure_goodput
from jengine.runner.failures import (
    is_consistent,
    list_directories,
    logged_errors,
    recreate_work_dir,
    wait_for_device,
)
from jengine.runner.runner_protocol import RunnerInternals
from jengine.train.peak_flops import compute_utilisation
from jengine.train.speed import format_speed

# without compiling, validation, checkpoints and setup
_TRAINING_PHASES = ("input", "hooks", "step", "logging")


def log_summary(runner: RunnerInternals) -> None:
    """Log the validations, the time by phase and the file paths after training; the hub gets the
    time as well.
    """
    _finish(runner)
    recreate_work_dir(runner)
    scalars = measure_speed(runner)
    goodput = _measure_goodput(runner)
    if runner.iters_this_session and goodput.sessions:
        scalars["speed/goodput"] = goodput.share
        scalars["speed/lost_iterations"] = float(goodput.lost_iterations)
        scalars["speed/lost_seconds"] = goodput.lost_seconds
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    _log_summary(runner, "Training is done.", scalars, goodput)


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
        _log_summary(
            runner, _describe_interruption(runner), measure_speed(runner), _measure_goodput(runner)
        )


def _finish(runner: RunnerInternals) -> None:
    """Wait for pending steps, saves and log lines."""
    wait_for_device(runner)
    with runner.phase_timer.phase("checkpoint"):
        runner.checkpointer.wait()
    with runner.phase_timer.phase("logging"):
        runner.log_writer.flush()


def _measure_goodput(runner: RunnerInternals) -> Goodput:
    update_record(runner)
    return measure_goodput(read_sessions(runner))


def _log_summary(
    runner: RunnerInternals, headline: str, scalars: Mapping[str, float], goodput: Goodput
) -> None:
    parts = [headline, format_speed(scalars, goodput), list_files(runner)]
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
    last = read_pointer(storage_path("work_dir", runner.work_dir))
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


def measure_speed(runner: RunnerInternals) -> dict[str, float]:
    """Return the time by phase and the speed, as scalars.

    Returns:
      'seconds/<phase>' for each phase, which add up to the time since training began; and, over the
      training time only, 'speed/iterations_per_second', and as far as they are known
      'speed/examples_per_second', 'speed/flops_per_second' over all devices and
      'speed/model_flops_utilisation'.
    """
    seconds = runner.phase_timer.report()
    scalars = {f"seconds/{phase}": duration for phase, duration in seconds.items()}
    training = sum(seconds.get(phase, 0.0) for phase in _TRAINING_PHASES)
    if runner.iters_this_session == 0 or training == 0.0:
        return scalars
    speed = runner.iters_this_session / training
    scalars["speed/iterations_per_second"] = speed
    if batch_size := runner.train_dataloader.batch_size:
        count = runner.train_loop.batches_per_iteration
        count *= runner.strategy.data_shard.for_axis(runner.train_dataloader.batch_axis).count
        scalars["speed/examples_per_second"] = speed * batch_size * count
    flops = runner.programs.flops()
    if flops:
        scalars["speed/flops_per_second"] = speed * sum(flops.values())
    devices: set[Any] = runner.state.step.sharding.device_set
    kind = next(iter(devices)).device_kind
    if (share := compute_utilisation(flops, 1.0 / speed, kind, len(devices))) is not None:
        scalars["speed/model_flops_utilisation"] = share
    return scalars
