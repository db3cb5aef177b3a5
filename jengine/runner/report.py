"""Report on a run: the parameter overview, the validation table, and the locations of its files."""

import math
import os
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jengine.logging import format_table
from jengine.paths import flatten
from jengine.runner.runner_protocol import Runner
from jengine.runner.speed import speed_of, speed_table

_MOST_ROWS = 40


def introduction(runner: Runner, groups: str) -> str:
    """Describe the run that starts: the device, the parameters, the groups, the hooks.

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


def conclude(runner: Runner) -> None:
    """Log the results of a training, its time by phase, and where its files are; record the numbers in the hub too.

    Args:
      runner: after training; its last checkpoint may still be pending.
    """
    with runner.phase_timer.phase("step"):
        runner.dispatch_limiter.drain()
    with runner.phase_timer.phase("checkpoint"):
        runner.checkpointer.wait()
    with runner.phase_timer.phase("logging"):
        runner.log_writer.flush()
    scalars = speed_of(runner)
    runner.message_hub.update_scalars(scalars, resumed=False)
    runner.visualizer.add_scalars(scalars, step=runner.iter, file_path=f"{runner.timestamp}.json")
    table = [validation_table(runner.validations)] if runner.validations else []
    runner.logger.info("\n".join(["Training is done.", *table, speed_table(scalars), closing_lines(runner)]))


def parameter_overview(params: Any) -> str:
    """Return a table of every parameter's path, shape, dtype and size; a long table is cut in the middle."""
    leaves = flatten(params)
    rows = [
        [path, str(tuple(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"] for path, leaf in leaves.items()
    ]
    if len(rows) > _MOST_ROWS:
        half = _MOST_ROWS // 2
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
        [str(epoch), str(iteration), *(_number(metrics.get(name)) for name in names)]
        for epoch, iteration, metrics in history
    ]
    return format_table(["epoch", "iter", *names], rows, title="Validations")


def closing_lines(runner: Runner) -> str:
    """Return the locations of checkpoints, logs and TensorBoard files."""
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


def _number(value: Any) -> str:
    return "" if value is None else f"{value:.4f}" if isinstance(value, float) else str(value)
