"""Position in the training data: saved with a checkpoint, and restored as exactly as the data
allow.
"""

import math
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.hooks.runner_protocol import Loader
from jengine.runner.runner_protocol import RunnerInternals

_IGNORED = {"replayed": "read and dropped", "lost": "repeated or lost"}
_EFFECTS = {
    "replayed": "a resumed run reads and drops the batches before its position, so it is exact "
    "only if they are the same in each run",
    "lost": "a resumed run continues with what it yields next",
}


def collect_position(runner: RunnerInternals, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the position between two iterations; None in a loop without one."""
    loop = runner.train_loop
    loader = runner.train_dataloader
    if loop is None or loop.position is None:
        return None
    # a hook saves before the loop counts it
    is_epoch_end = loop.by_epoch and meta["epoch"] > loop.epoch
    shard = runner.strategy.data_shard.for_axis(loader.batch_axis)
    gathered = runner.processes.all_gather("the position in the data", (shard.index, loop.position))
    # the processes that read a shard have the same position in it
    positions = dict(reversed(gathered))
    return {
        "positions": [positions[index] for index in range(shard.count)],
        "inner_iter": 0 if is_epoch_end else meta["iter"] - loop.epoch_start,
        "batch_size": loader.batch_size,
        "dataset_size": loader.dataset_size,
        "epoch_length": loop.epoch_length,
        "devices": shard.count * runner.strategy.batch_multiple,
    }


def warn_if_inexact(runner: RunnerInternals) -> None:
    """Log that the position cannot be saved, or raise ConfigError if `resume` is 'exact'."""
    loader = runner.train_dataloader
    if loader.resume == "exact":
        return
    effect = _EFFECTS[loader.resume]
    if runner.resume_is_exact:
        raise ConfigError(
            f"`train_dataloader` must be data whose position can be saved with resume='exact', "
            f"got {loader.kind}: {effect}; {loader.advice or 'use data with a position'}"
        )
    advice = f"; for an exact position, {loader.advice}" if loader.advice else ""
    runner.logger.info(f"The position in {loader.kind} cannot be saved: {effect}{advice}.")


def restore_position(runner: RunnerInternals, saved: Mapping[str, Any] | None) -> None:
    """Continue at a checkpoint's position, once the loop's `iter` and `epoch` have been restored.

    Another batch size or number of data shards continues at the same example if the data have
    access by index, or yield examples; otherwise, and with another dataset, the pass starts again.
    What is repeated or dropped is logged.

    Raises:
      ConfigError: the same examples cannot follow, and `resume` is 'exact'.
    """
    loop = runner.train_loop
    loader = runner.train_dataloader
    if saved is None:
        if loop.by_epoch and loop.epoch_length:
            loop.epoch_start = loop.epoch * loop.epoch_length
        return
    # in which the position was saved; the loop goes on from it
    loader.set_step(max(loop.iter - 1, 0))
    positions = saved["positions"]
    shard = runner.strategy.data_shard.for_axis(loader.batch_axis)
    compared = (
        ("batch size", saved["batch_size"], loader.batch_size),
        ("dataset of", saved["dataset_size"], loader.dataset_size),
        ("data shards:", len(positions), shard.count),
    )
    changes = [
        f"{name} {new} ({old} in the checkpoint)" for name, old, new in compared if old != new
    ]
    batches = (saved["batch_size"] or 0) * len(positions), (loader.batch_size or 0) * shard.count
    total = sum(position["examples"] for position in positions)
    if not changes:
        loop.position = positions[shard.index]
        loop.epoch_start = loop.iter - saved["inner_iter"]
        _report_inexact(runner, total)
        devices = shard.count * runner.strategy.batch_multiple
        before = saved.get("devices", devices)  # none in checkpoints of earlier versions
        if devices != before and batches[1]:
            _report_places(runner, batches[1], f"{devices} devices", devices, before)
        return
    first = positions[0]
    is_divisible = len(positions) == shard.count or loader.has_random_access
    if saved["dataset_size"] != loader.dataset_size or not is_divisible:
        position = {"epoch": first["epoch"], "position": 0, "examples": 0}  # the pass starts again
    elif len(positions) == shard.count:
        position = positions[shard.index]
    else:
        position = {"epoch": first["epoch"], "position": -1, "examples": total // shard.count}
    loader.load_state_dict(position)
    loop.position = loader.state_dict()  # in batches of this run
    repeated = total - loop.position["examples"] * shard.count
    if saved["inner_iter"] and loop.by_epoch and loop.epoch_length == loader.length:
        # Some loaders give the position after the last batch of a pass as the start of the next
        is_next_epoch = first["position"] == 0 or loop.position["epoch"] > first["epoch"]
        loop.epoch += is_next_epoch
        loop.epoch_start = loop.iter - loop.position["position"]
        repeated = 0 if is_next_epoch else repeated
    else:
        loop.epoch_start = loop.iter - saved["inner_iter"]
    is_same = batches[0] == batches[1] > 0 and saved["dataset_size"] == loader.dataset_size
    # only on other processes
    if is_same and not repeated and loop.epoch_length == saved["epoch_length"]:
        _report_places(
            runner, batches[1], f"{shard.count} data shards", shard.count, len(positions)
        )
        return
    _report_changes(runner, saved, changes, first["epoch"] + 1, repeated)


def start_at(runner: RunnerInternals, step: int) -> None:
    """Continue after `step` iterations of another loop: at that place in this run's order of the
    data.
    """
    loop = runner.train_loop
    loader = runner.train_dataloader
    length = loop.epoch_length if loop.by_epoch else loader.length
    loop.iter = step
    if length is None:  # a stream: what the other loop has read of it is unknown
        runner.logger.warning(
            f"The data start from the beginning: {loader.kind} has no length, so no place of step "
            f"{step}."
        )
        return
    epoch, inner = divmod(step, length)
    loop.epoch, loop.epoch_start = (epoch, step - inner) if loop.by_epoch else (0, 0)
    loop.position = seek_iteration(loader, step, loop.batches_per_iteration)


def seek_iteration(loader: Loader, step: int, batches: int) -> Any:
    """Set the data to the place after `step` iterations with so many batches each, and return it.

    The loader then has the batch size of the last of them. Data without a length are set to their
    start.
    """
    loader.set_step(0)
    loader.set_epoch(0)
    if loader.length is None:
        return loader.state_dict()
    at = 0
    while at < step:
        position = loader.state_dict()
        if loader.set_step(at):
            loader.load_state_dict(position)  # the same example
            position = loader.state_dict()
        end = int(min(step, loader.next_change(at)))
        skipped = (end - at) * batches
        left = loader.length - position["position"]
        if loader.batch_sizes is not None and position["examples"] and skipped < left:
            # The position of a batch says nothing within a pass that has started with another size.
            examples = position["examples"] + skipped * (loader.batch_size or 0)
            loader.load_state_dict(
                {**position, "position": position["position"] + skipped, "examples": examples}
            )
        else:
            passes, start = divmod(skipped - left, loader.length)
            loader.set_epoch(position["epoch"] + 1 + passes, start)
        at = end
    return loader.state_dict()


def _report_places(
    runner: RunnerInternals, batch: int, places: str, count: int, before: int
) -> None:
    runner.logger.info(
        f"The run continues at the same example with the same global batch of {batch}: "
        f"{batch // count} examples on each of {places}, instead of {batch // before} on {before}."
    )


def _report_inexact(runner: RunnerInternals, examples: int) -> None:
    loader = runner.train_dataloader
    if loader.resume == "exact" or not examples:
        return
    effect = _IGNORED[loader.resume]
    if runner.resume_is_exact:
        raise ConfigError(
            "`resume` must continue with the same examples with resume='exact', got "
            f"{loader.kind}, whose position cannot be saved: {examples} examples are {effect}"
        )
    runner.logger.warning(
        f"The position in {loader.kind} was not saved: {examples} examples of this pass are "
        f"{effect}."
    )


def _report_changes(
    runner: RunnerInternals,
    saved: Mapping[str, Any],
    changes: list[str],
    number: int,
    repeated: int,
) -> None:
    loop = runner.train_loop
    effect = "the run continues at the same example"
    if repeated:
        what = "repeated" if repeated > 0 else "skipped"
        effect = f"{abs(repeated)} examples of pass {number} over the data are {what}"
    if runner.resume_is_exact:
        raise ConfigError(
            "the data must be those of the checkpoint with resume='exact', got "
            f"{', '.join(changes)}: {effect}"
        )
    lengths = ""
    if loop.epoch_length != saved["epoch_length"]:
        lengths = (
            f", an epoch has {loop.epoch_length} iterations instead of {saved['epoch_length']}"
        )
    remaining = f"{loop.max_iters - loop.iter} iterations remain"
    if loop.max_iters == math.inf:
        remaining = f"the run ends after {loop.max_epochs} epochs"
    runner.logger.warning(
        f"The data differ from those of the checkpoint: {', '.join(changes)}: {effect}{lengths}, "
        f"and {remaining}. Schedules in epochs continue at their place in the epoch, schedules in "
        "iterations at their iteration."
    )
