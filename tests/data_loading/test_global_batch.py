"""Test that a global batch has the same examples on any number of shards."""

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import build_dataloader
from tests.refusals import check_refusal


def batches(shards, **section):
    """Return the examples of each global batch, sorted, over all shards."""
    loaders = [
        build_dataloader(
            {"dataset": list(range(30)), **section}, train=True, seed=3, process_index=shard, process_count=shards
        )
        for shard in range(shards)
    ]
    return [np.sort(np.concatenate(parts)).tolist() for parts in zip(*loaders, strict=True)]


@pytest.mark.parametrize("shards", [2, 4, 8])
def test_shards_have_the_batches_of_one(shards):
    expected = batches(1, global_batch_size=8)
    assert len(expected) == 3  # of 30 examples; with equal shares of 32, four would be possible
    assert batches(shards, global_batch_size=8) == expected


@pytest.mark.parametrize(
    ("section", "words"),
    [
        (dict(global_batch_size=9), ["global_batch_size`", "got 9"]),
        (dict(global_batch_size=0), ["global_batch_size`", "at least 1", "got 0"]),
        (dict(global_batch_size=8, batch_size=4), ["`global_batch_size`", "`batch_size`", "got both"]),
        (dict(global_batch_size=8, batch_axis=None), ["`global_batch_size`", "batch_axis=None", "got both"]),
    ],
)
def test_other_global_batches_are_refused(section, words):
    check_refusal(lambda: batches(2, **section), (ConfigError, TypeError, ValueError), *words)
