"""Comparison of the first batches of all processes: whether each reads its share of the data."""

import collections
import logging

import jax
import numpy as np

from jengine.config.description import hash_text
from jengine.data.batch_check import Batch
from jengine.data.host_entries import select_arrays
from jengine.parallel.mesh import DataShard
from jengine.parallel.processes import ProcessGroup, ProcessMismatchError

logger = logging.getLogger("jengine")


def check_readers(path: str, batch: Batch, own: DataShard, processes: ProcessGroup) -> None:
    """Compare the first batches of all processes.

    Raises:
      ProcessMismatchError: processes whose devices hold the same rows have read different
        examples.
    """
    if processes.count == 1:
        return
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(select_arrays(batch))]
    digest = hash_text(b"".join(leaf.tobytes() for leaf in leaves))
    # Equal examples, such as those of a test, do not tell whether the data are divided.
    is_varied = any(leaf.ndim and (leaf != leaf[:1]).any() for leaf in leaves)
    gathered = processes.all_gather(f"the first batch of {path}", (own.index, digest, is_varied))
    # by shard: the first process, and what it has read
    readers: dict[int, tuple[int, str]] = {}
    for process, (shard, other, _) in enumerate(gathered):
        first, expected = readers.setdefault(shard, (process, other))
        if other != expected:
            raise ProcessMismatchError(
                f"`{path}` must yield the same examples on processes {first} and {process}, "
                "because their devices hold the same rows of a batch, got different first "
                "batches; divide the data by `runner.strategy.data_shard`, and draw random "
                "numbers from its index, not from the process index"
            )
    undivided = collections.defaultdict[str, list[int]](list)
    for process, digest in readers.values():
        if gathered[process][2]:
            undivided[digest].append(process)
    for same in undivided.values():
        if len(same) > 1:
            logger.warning(
                f"{path} yields the same first batch on processes "
                f"{', '.join(map(str, same))}, whose devices hold different rows: each "
                f"example is probably read {len(same)} times. Divide the data by "
                "`runner.strategy.data_shard`, its `index` and `count`."
            )
