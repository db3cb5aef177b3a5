"""Position in the training data: saved with a checkpoint, and restored as exactly as the data
allow.
"""

from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.plugins import load_provided
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

    An extra continues with other data, see `continue_with` there. What is repeated or dropped is
    logged.

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
    if not changes:
        loop.position = positions[shard.index]
        loop.epoch_start = loop.iter - saved["inner_iter"]
        total = sum(position["examples"] for position in positions)
        if loader.resume != "exact" and total:
            effect = f"{total} examples of this pass are {_IGNORED[loader.resume]}"
            report_difference(run, f"The position in {loader.kind} was not saved", effect)
    devices = shard.count * run.strategy.batch_multiple
    before = saved.get("devices", devices)  # none in checkpoints of earlier versions
    if changes or devices != before:
        load_provided("changed_data", "continue_with")(run, loop, saved, changes)


def report_difference(run: Run, what: str, effect: str) -> None:
    """Warn that other examples follow than in the checkpoint's run, which 'exact' refuses."""
    if run.resume_is_exact:
        raise ConfigError(
            f"`train_dataloader` must continue with the same examples with resume='exact'. {what}: "
            f"{effect}"
        )
    run.logger.warning(f"{what}: {effect}.")
