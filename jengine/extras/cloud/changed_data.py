"""Resume with another batch size, dataset, or number of data shards or devices."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from jengine.hooks.run import Run
from jengine.runner.loops import TrainLoop
from jengine.runner.resume_data import report_difference


def continue_with(
    run: Run, loop: TrainLoop, saved: Mapping[str, Any], changes: Sequence[str]
) -> None:
    """Continue at the same example if the data have access by index, or yield examples; else, and
    with another dataset, start the pass again. Log what is repeated or dropped.

    Args:
      run, loop: the run, whose `iter` and `epoch` are those of the checkpoint.
      saved: what `collect_position` returned.
      changes: what differs, as text; empty if only the number of devices does.

    Raises:
      ConfigError: the same examples cannot follow, and `resume` is 'exact'.
    """
    loader = loop.dataloader
    positions = saved["positions"]
    shard = run.strategy.data_shard.for_axis(loader.batch_axis)
    batch = (loader.batch_size or 0) * shard.count
    if not changes:
        devices = shard.count * run.strategy.batch_multiple
        if batch:
            _log_places(run, batch, f"{devices} devices", devices, saved["devices"])
        return
    total = sum(position["examples"] for position in positions)
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
    report_difference(
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
