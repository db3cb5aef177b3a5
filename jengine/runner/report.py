"""Report on a run at its end: the validation table, the time by phase, and the paths of its files."""

import os
import pathlib
import signal
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.checkpoint import find_latest, read_meta
from jengine.config import format_config, write_config
from jengine.errors import ConfigError
from jengine.logging import open_log_file
from jengine.runner.failures import is_consistent, recreate_work_dir
from jengine.runner.runner_protocol import Runner
from jengine.runner.speed import format_speed, measure_speed, wait_for_device
from jengine.runner.validation_table import format_validations


def format_config_file(cfg: Mapping[str, Any], work_dir: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Return the text of the config file in the work dir ('' without a config), and why it does not reproduce it."""
    return format_config(cfg, os.path.join(work_dir, "config.py")) if cfg else ("", [])


def open_files(runner: Runner, problems: Sequence[str]) -> None:
    """Open the log file, write the config to the work dir and the visualizer, and warn if it cannot be run again.

    Args:
      runner: nothing is refused any more.
      problems: why the config file does not reproduce a value, see `format_config`.

    Raises:
      ConfigError: the work dir cannot be written.
    """
    try:
        open_log_file(runner.logger)
    except OSError as error:
        raise ConfigError(f"`work_dir` must be writable, got {runner.work_dir}: {error}") from error
    if not runner.cfg_text or not runner.is_main_process:
        return
    write_config(runner.cfg_text, os.path.join(runner.work_dir, "config.py"))
    runner.visualizer.add_config(runner.cfg_text)
    if problems:
        runner.logger.warning(f"The config in {runner.work_dir} cannot be run again: {'; '.join(problems)}.")


def log_summary(runner: Runner) -> None:
    """Log the validations of a run, its time by phase, and the paths of its files; record the time in the hub too.

    Args:
      runner: after training; its last checkpoint may still be pending.
    """
    _finish(runner)
    recreate_work_dir(runner)
    scalars = measure_speed(runner)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    _log_summary(runner, "Training is done.", scalars)


def log_interruption(runner: Runner) -> None:
    """Log what is saved of an interrupted run and how to continue it, then the same as `log_summary`.

    The time is not recorded: the continued run records that of the whole run.

    Args:
      runner: after a signal, its completed iterations saved; the save may still be pending.
    """
    if runner.processes.count > 1 and not runner.interrupts.agreed:
        return  # it ends without the other processes
    if not is_consistent(runner):  # a second signal, within an iteration
        runner.logger.warning(f"{_describe_interruption(runner)}\n{list_files(runner)}")
        return
    try:
        _finish(runner)
    except Exception as error:  # the run ends in any case
        runner.logger.error(f"The run could not be completed: {type(error).__name__}: {error}")
    if runner.is_main_process:  # the others would only look for the checkpoints, and log nothing
        _log_summary(runner, _describe_interruption(runner), measure_speed(runner))


def _describe_interruption(runner: Runner) -> str:
    """Return what is saved, and the command that continues the run."""
    signum = runner.interrupts.signum
    reason = f" by {'Ctrl-C' if signum == signal.SIGINT else signal.Signals(signum).name}" if signum else ""
    at = f"Interrupted{reason} after iteration {runner.iter}"
    directories = [runner.work_dir, *(path for hook in runner.hooks for path in hook.list_directories(runner.work_dir))]
    newest = next((path for path in map(find_latest, directories) if path is not None), None)
    if newest is None:
        return f"{at}; nothing is saved: the run has no checkpoint."
    saved = read_meta(newest)["meta"]["iter"]
    lost = f", of iteration {saved}" if saved < runner.iter else ""
    is_default = pathlib.Path(newest).parent == pathlib.Path(runner.work_dir)
    command = runner.resume_command(None if is_default else str(newest))
    return f"{at}; saved: {os.path.basename(newest)}{lost}. To continue: {command}"


def _finish(runner: Runner) -> None:
    """Wait for the steps, the saves and the log lines that are pending."""
    wait_for_device(runner)
    with runner.phase_timer.phase("checkpoint"):
        runner.checkpointer.wait()
    with runner.phase_timer.phase("logging"):
        runner.log_writer.flush()


def _log_summary(runner: Runner, headline: str, scalars: Mapping[str, float]) -> None:
    table = [_validation_table(runner)] if runner.validations else []
    runner.logger.info("\n".join([headline, *table, format_speed(scalars), list_files(runner)]))


def _validation_table(runner: Runner) -> str:
    monitored = [(name, rule) for hook in runner.hooks for _, name, rule in hook.monitored_metrics()]
    return format_validations(runner.validations, by_epoch=runner.train_loop.by_epoch, monitored=monitored)


def list_files(runner: Runner) -> str:
    """Return the paths of checkpoints, logs and TensorBoard files, one per line."""
    lines = [f"checkpoints:  {runner.work_dir}"]
    last = os.path.join(runner.work_dir, "last_checkpoint")
    if os.path.exists(last):
        with open(last) as file:
            lines = [f"checkpoints:  {runner.work_dir} (last: {os.path.basename(file.read().strip())})"]
    lines.append(f"log:          {os.path.join(runner.log_dir, runner.timestamp + '.log')}")
    vis_dir = os.path.join(runner.log_dir, "vis_data")
    lines.append(f"scalars:      {os.path.join(vis_dir, 'scalars.json')}")
    if os.path.isdir(vis_dir) and any("tfevents" in name for name in os.listdir(vis_dir)):
        lines.append(f"TensorBoard:  tensorboard --logdir {vis_dir}")
    return "\n".join(lines)
