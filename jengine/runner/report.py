"""Report on a run: the parameter overview, the validation table, and the paths of its files."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.config import format_config, write_config
from jengine.logging import format_table
from jengine.paths import flatten
from jengine.runner.failures import recreate_work_dir
from jengine.runner.resume_data import warn_if_inexact
from jengine.runner.runner_protocol import Runner
from jengine.runner.speed import format_speed, measure_speed

_MAX_ROWS = 40


def describe_start(runner: Runner, groups: str) -> str:
    """Return a description of a run before training: its device, parameters, parameter groups and hooks.

    Args:
      runner: about to train.
      groups: the table of its parameter groups.
    """
    device = jax.local_devices()[0]
    return "\n".join(
        [
            f"{runner.experiment_name}: jax {jax.__version__} on {device.platform} ({device.device_kind}), "
            f"seed {runner.seed}",
            parameter_overview(runner.state.params),
            groups,
            "Hooks will be executed in the following order:",
            runner.get_hooks_info(),
        ]
    )


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


def log_start(runner: Runner, groups: tuple[Sequence[str], Sequence[Sequence[str]]]) -> None:
    """Log a description of a run before training, and what it cannot do as configured.

    Args:
      runner: about to train.
      groups: headings and rows of the table of its parameter groups.

    Raises:
      ConfigError: the position in the data cannot be saved, and `resume_policy.data` is 'exact'.
    """
    runner.logger.info(describe_start(runner, format_table(*groups, title="Parameter groups")))
    warn_if_chunks_are_blocked(runner)
    warn_if_inexact(runner)


def warn_if_chunks_are_blocked(runner: Runner) -> None:
    """Log a warning if hooks limit chunks to one step although `steps_per_call` is larger.

    Args:
      runner: about to train.
    """
    steps_per_call, hooks = runner.train_loop.steps_per_call, runner.hook_list.list_chunk_blockers(runner)
    if steps_per_call > 1 and hooks:
        names = ", ".join(type(hook).__name__ for hook in hooks)
        runner.logger.warning(
            f"steps_per_call={steps_per_call} has no effect: {names} may act at each step; "
            "iterations run one by one. To allow chunks, define `next_step`, `runs_ahead` or `after_train_chunk`."
        )


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


def parameter_overview(params: Any) -> str:
    """Return a table of the path, shape, dtype and size of every parameter; a long table is cut in the middle."""
    leaves = flatten(params)
    rows = [
        [path, str(tuple(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"] for path, leaf in leaves.items()
    ]
    if len(rows) > _MAX_ROWS:
        half = _MAX_ROWS // 2
        rows = [*rows[:half], [f"… {len(rows) - 2 * half} more …", "", "", ""], *rows[-half:]]
    total = sum(math.prod(leaf.shape) for leaf in leaves.values())
    bytes_ = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves.values())
    table = format_table(["parameter", "shape", "dtype", "size"], rows, title="Parameters")
    return f"{table}\n{len(leaves)} tensors, {total:,} parameters, {bytes_ / 2**20:,.2f} MiB"


def group_table(optim_wrapper: Any) -> str:
    """Return the table of parameter groups, one for each optimizer wrapper."""
    columns, rows = optim_wrapper.group_table()
    return format_table(columns, rows, title="Parameter groups")


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
