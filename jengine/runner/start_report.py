"""Describe a run before its first step: briefly on the terminal, with every parameter and stage in the log file."""

import math
import os
from collections.abc import Sequence
from typing import Any

import jax

from jengine.logging import format_table, shorten_rows
from jengine.paths import flatten
from jengine.runner.resume_data import warn_if_inexact
from jengine.runner.runner_protocol import Runner
from jengine.runner.versions import describe_device
from jengine.sharding import DataShard

GroupTable = tuple[Sequence[str], Sequence[Sequence[str]]]
"""The columns and rows of a table of parameter groups."""

# With these limits the description and some warnings have at most 40 lines.
_MAX_GROUPS = 8
_MAX_HOOKS = 10
_MAX_PARAMETERS = 40
_MAX_PATTERNS = 20  # characters, so that the table fits into 80 columns
_MODES = ("train", "val", "test")


def log_start(runner: Runner, groups: GroupTable) -> None:
    """Log a description of a run before training, and what it cannot do as configured.

    The complete tables of parameters, groups and stages have the level DEBUG: the log file has them.

    Args:
      runner: about to train.
      groups: the table of its parameter groups.

    Raises:
      ConfigError: the position in the data cannot be saved, and `resume_policy.data` is 'exact'.
    """
    details = [parameter_overview(runner.state.params), format_groups(*groups), runner.get_hooks_info()]
    runner.logger.debug("\n".join([*details[:2], "Hooks will be executed in the following order:", details[2]]))
    runner.logger.info(describe_start(runner, groups))
    warn_if_chunks_are_blocked(runner)
    warn_if_inexact(runner)


def describe_start(runner: Runner, groups: GroupTable) -> str:
    """Return a short description: name, devices, seed, model size, groups, hooks, data, and the path of the log.

    Args:
      runner: about to train.
      groups: the table of its parameter groups.
    """
    return "\n".join(
        [
            runner.experiment_name,
            f"devices:    {_describe_devices(runner)}, jax {jax.__version__}, seed {runner.seed}",
            f"model:      {parameter_size(runner.state.params)}",
            *_describe_data(runner),
            f"log:        {_shorten_path(os.path.join(runner.log_dir, f'{runner.timestamp}.log'))} (with all details)",
            _short_group_table(*groups),
            hook_table(runner),
        ]
    )


def hook_table(runner: Runner) -> str:
    """Return a table of the hooks in order: priority, the loops in which they act, and their traced points."""
    rows = []
    for hook in runner.hook_list:
        stages = hook.get_triggered_stages()
        loops = [mode for mode in _MODES if any(f"_{mode}" in stage for stage in stages)]
        others = [stage for stage in stages if not any(f"_{mode}" in stage for mode in _MODES)]
        traced = [point.removeprefix("traced_") for point in hook.get_traced_points()]
        priority = runner.hook_list.priority_name(hook)
        rows.append([type(hook).__name__, priority, ", ".join(loops or others), ", ".join(traced)])
    return format_table(["hooks, in order", "priority", "acts in", "in the step"], shorten_rows(rows, _MAX_HOOKS))


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


def parameter_overview(params: Any) -> str:
    """Return a table of the path, shape, dtype and size of every parameter; a long table is cut in the middle."""
    rows = [
        [path, str(tuple(leaf.shape)), str(leaf.dtype), f"{math.prod(leaf.shape):,}"]
        for path, leaf in flatten(params).items()
    ]
    columns = ["parameter", "shape", "dtype", "size"]
    return f"{format_table(columns, shorten_rows(rows, _MAX_PARAMETERS), title='Parameters')}\n{parameter_size(params)}"


def parameter_size(params: Any) -> str:
    """Return the numbers of tensors and parameters, and their memory."""
    leaves = flatten(params).values()
    total = sum(math.prod(leaf.shape) for leaf in leaves)
    size = sum(math.prod(leaf.shape) * leaf.dtype.itemsize for leaf in leaves)
    return f"{len(leaves)} tensors, {total:,} parameters, {size / 2**20:,.2f} MiB"


def format_groups(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table of parameter groups as text."""
    return format_table(columns, rows, title="Parameter groups")


def _short_group_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return the table of parameter groups, cut in the middle; rules that match nothing are its last rows."""
    return format_groups(columns, [[_cut(cell) for cell in row] for row in shorten_rows(rows, _MAX_GROUPS)])


def _cut(cell: str) -> str:
    return cell if len(cell) <= _MAX_PATTERNS else f"{cell[: _MAX_PATTERNS - 1]}…"


def _describe_devices(runner: Runner) -> str:
    kind = describe_device(jax.local_devices()[0])
    mesh_shape, description = runner.strategy.mesh_shape, runner.strategy.mesh_description
    mesh = f", mesh {description}" if description else ""
    processes = f", {runner.processes.count} processes" if runner.processes.count > 1 else ""
    return f"{math.prod(mesh_shape.values())} x {kind}{mesh}{processes}"


def _describe_data(runner: Runner) -> list[str]:
    """Return a line for the training data, and one for the validation data if there are any."""
    loaders = {"train data": runner.train_dataloader}
    if runner.val_dataloader is not None:
        loaders["val data"] = runner.val_dataloader
    lines = []
    for name, loader in loaders.items():
        batches = "length unknown" if loader.length is None else f"{loader.length:,} batches"
        size = f" of {loader.batch_size}" if loader.batch_size else ""
        if loader.batch_size and runner.processes.count > 1:
            size += _describe_global_batch(loader.batch_size, runner.strategy.data_shard)
        lines.append(f"{name + ':':<11} {loader.kind}, {batches}{size}")
    return lines


def _describe_global_batch(batch_size: int, shard: DataShard) -> str:
    readers = f"; each {len(shard.readers)} processes read the same" if len(shard.readers) > 1 else ""
    return f" per process, {batch_size * shard.count} in all{readers}"


def _shorten_path(path: str) -> str:
    """Return a path below the current directory relative to it, any other as it is."""
    relative = os.path.relpath(path)
    return path if relative.startswith(os.pardir) else relative
