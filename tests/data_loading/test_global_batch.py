"""Test that a global batch has the same examples on any number of shards."""

import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.data import build_dataloader


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
    ("section", "message"),
    [
        (dict(global_batch_size=9), "global_batch_size` must be a multiple of 2, the number of data shards, got 9"),
        (dict(global_batch_size=0), "global_batch_size` must be an integer of at least 1, got 0"),
        (dict(global_batch_size=8, batch_size=4), "either `global_batch_size` or `batch_size`, got both"),
        (dict(global_batch_size=8, batch_axis=None), "either `global_batch_size` or batch_axis=None, got both"),
    ],
)
def test_other_global_batches_are_refused(section, message):
    with pytest.raises((ConfigError, TypeError, ValueError), match=message):
        batches(2, **section)
