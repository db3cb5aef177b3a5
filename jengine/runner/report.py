"""Report on a run at its end: the validation table, the time by phase, and the paths of its files."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.config import format_config, write_config
from jengine.logging import format_table
from jengine.runner.failures import recreate_work_dir
from jengine.runner.runner_protocol import Runner
from jengine.runner.speed import format_speed, measure_speed

def format_config_file(cfg: Mapping[str, Any], work_dir: str | os.PathLike[str]) -> tuple[str, list[str]]:
    """Return the text of the config file in the work dir ('' without a config), and why it does not reproduce it."""
    return format_config(cfg, os.path.join(work_dir, "config.py")) if cfg else ("", [])


def write_config_file(runner: Runner, problems: Sequence[str]) -> None:
    """Write the config to the work dir and to the visualizer, and log a warning if it cannot be run again.

    Args:
      runner: a run with a config.
      problems: why the file does not reproduce a value, see `format_config`.
    """
    write_config(runner.cfg_text, os.path.join(runner.work_dir, "config.py"))
    runner.visualizer.add_config(runner.cfg_text)
    if problems:
        runner.logger.warning(f"The config in {runner.work_dir} cannot be run again: {'; '.join(problems)}.")


def log_summary(runner: Runner) -> None:
    """Log the validations of a run, its time by phase, and the paths of its files; record the time in the hub too.

    Args:
      runner: after training; its last checkpoint may still be pending.
    """
    with runner.phase_timer.phase("step"):
        runner.dispatch_limiter.drain()
    with runner.phase_timer.phase("checkpoint"):
        runner.checkpointer.wait()
    with runner.phase_timer.phase("logging"):
        runner.log_writer.flush()
    recreate_work_dir(runner)
    scalars = measure_speed(runner)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    table = [validation_table(runner.validations)] if runner.validations else []
    runner.logger.info("\n".join(["Training is done.", *table, format_speed(scalars), list_files(runner)]))


def validation_table(history: Sequence[tuple[int, int, Mapping[str, float]]]) -> str:
    """Return a table with a row for each validation: epoch, iteration, and every metric."""
    names = list(dict.fromkeys(name for _, _, metrics in history for name in metrics))
    rows = [
        [str(epoch), str(iteration), *(_format_number(metrics.get(name)) for name in names)]
        for epoch, iteration, metrics in history
    ]
    return format_table(["epoch", "iter", *names], rows, title="Validations")


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


def _format_number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
