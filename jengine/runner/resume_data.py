"""Position in the training data: saved with a checkpoint, and restored as exactly as the data
allow.
"""

import math
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.hooks.run import Run
from jengine.runner.loops import TrainLoop

EFFECTS = {
    "replayed": "a resumed run reads and drops the batches before its position, so it is exact "
    "only if they are the same in each run",
    "lost": "a resumed run continues with what it yields next",
}
_IGNORED = {"replayed": "read and dropped", "lost": "repeated or lost"}


def collect_position(run: Run, loop: TrainLoop, meta: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the position between two iterations; None in a loop without one."""
    if loop is None or loop.position is None:
        return None
    loader = loop.dataloader
    # a hook saves before the loop counts it
    is_epoch_end = loop.by_epoch and meta["epoch"] > loop.epoch
    shard = run.strategy.data_shard.for_axis(loader.batch_axis)
    gathered = run.processes.all_gather("the position in the data", (shard.index, loop.position))
    # the processes that read a shard have the same position in it
    positions = dict(reversed(gathered))
    return {
        "positions": [positions[index] for index in range(shard.count)],
        "inner_iter": 0 if is_epoch_end else meta["iter"] - loop.epoch_start,
        "batch_size": loader.batch_size,
        "dataset_size": loader.dataset_size,
        "epoch_length": loop.epoch_length,
        "devices": shard.count * run.strategy.batch_multiple,
    }


def restore_position(run: Run, loop: TrainLoop, saved: Mapping[str, Any] | None) -> None:
    """Continue at a checkpoint's position, once the loop's `iter` and `epoch` have been restored.

    Another batch size or number of data shards continues at the same example if the data have
    access by index, or yield examples; otherwise, and with another dataset, the pass starts again.
    What is repeated or dropped is logged.

    Raises:
      ConfigError: the same examples cannot follow, and `resume` is 'exact'.
    """
    if saved is None:
        if loop.by_epoch and loop.epoch_length:
            loop.epoch_start = loop.epoch * loop.epoch_length
        return
    loader = loop.dataloader
    # in which the position was saved; the loop goes on from it
    loader.set_step(max(loop.iter - 1, 0))
    positions = saved["positions"]
    shard = run.strategy.data_shard.for_axis(loader.batch_axis)
    compared = (
        ("batch size", saved["batch_size"], loader.batch_size),
        ("dataset of", saved["dataset_size"], loader.dataset_size),
        ("data shards:", len(positions), shard.count),
    )
    changes = [
        f"{name} {new} ({old} in the checkpoint)" for name, old, new in compared if old != new
    ]
    total = sum(position["examples"] for position in positions)
    batch = (loader.batch_size or 0) * shard.count
    if not changes:
        loop.position = positions[shard.index]
        loop.epoch_start = loop.iter - saved["inner_iter"]
        if loader.resume != "exact" and total:
            effect = f"{total} examples of this pass are {_IGNORED[loader.resume]}"
            _report(run, f"The position in {loader.kind} was not saved", effect)
        devices = shard.count * run.strategy.batch_multiple
        before = saved.get("devices", devices)  # none in checkpoints of earlier versions
        if devices != before and batch:
            _log_places(run, batch, f"{devices} devices", devices, before)
        return
    first = positions[0]
    is_same_dataset = saved["dataset_size"] == loader.dataset_size
    if not is_same_dataset or not (len(positions) == shard.count or loader.has_random_access):
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
    is_same_batch = (saved["batch_size"] or 0) * len(positions) == batch > 0
    is_same_length = loop.epoch_length == saved["epoch_length"]
    if is_same_dataset and is_same_batch and is_same_length and not repeated:
        # only on other processes
        _log_places(run, batch, f"{shard.count} data shards", shard.count, len(positions))
        return
    effect = "the run continues at the same example"
    if repeated:
        what = "repeated" if repeated > 0 else "skipped"
        effect = f"{abs(repeated)} examples of pass {first['epoch'] + 1} over the data are {what}"
    if not is_same_length:
        effect += f", an epoch has {loop.epoch_length} iterations instead of "
        effect += f"{saved['epoch_length']}"
    remaining = f"{loop.max_iters - loop.iter} iterations remain"
    if loop.max_iters == math.inf:
        remaining = f"the run ends after {loop.max_epochs} epochs"
    _report(
        run,
        f"The data differ from those of the checkpoint: {', '.join(changes)}",
        f"{effect}, and {remaining}. Schedules in epochs continue at their place in the epoch, "
        "schedules in iterations at their iteration",
    )


def _log_places(run: Run, batch: int, places: str, count: int, before: int) -> None:
    run.logger.info(
        f"The run continues at the same example with the same global batch of {batch}: "
        f"{batch // count} examples on each of {places}, instead of {batch // before} on {before}."
    )


def _report(run: Run, what: str, effect: str) -> None:
    """Warn that other examples follow than in the checkpoint's run, which 'exact' refuses."""
    if run.resume_is_exact:
        raise ConfigError(
            f"`train_dataloader` must continue with the same examples with resume='exact'. {what}: "
            f"{effect}"
        )
    run.logger.warning(f"{what}: {effect}.")
