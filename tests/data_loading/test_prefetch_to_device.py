import traceback

import jax
import numpy as np
import pytest

from jengine.data import prefetch_to_device


class Source:
    def __init__(self, size, fail_at=None):
        self.size = size
        self.fail_at = fail_at
        self.given = 0
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.given == self.fail_at:
            raise RuntimeError("broken file")
        if self.given == self.size:
            raise StopIteration
        self.given += 1
        return {"x": np.full(2, self.given)}

    def close(self):
        self.closed = True


def test_batches_arrive_on_the_device_in_order():
    got = list(prefetch_to_device(Source(4)))
    assert all(isinstance(batch["x"], jax.Array) for batch in got)
    assert [int(batch["x"][0]) for batch in got] == [1, 2, 3, 4]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_batches_are_under_way_beside_the_consumers(depth):
    source = Source(10)
    batches = prefetch_to_device(source, depth=depth)
    assert source.given == 0
    next(batches)
    assert source.given == depth + 1
    next(batches)
    assert source.given == depth + 2


def test_fewer_batches_than_the_depth_all_arrive():
    assert len(list(prefetch_to_device(Source(1), depth=3))) == 1
    assert list(prefetch_to_device([], depth=3)) == []


def test_put_gets_the_whole_batch_once():
    seen = []
    list(prefetch_to_device(Source(3), put=lambda batch: seen.append(set(batch))))
    assert seen == [{"x"}] * 3


def test_an_exception_of_the_source_comes_after_the_batches_before_it_with_its_traceback():
    batches = prefetch_to_device(Source(9, fail_at=3), depth=2)
    assert [int(next(batches)["x"][0]) for _ in range(3)] == [1, 2, 3]
    with pytest.raises(RuntimeError, match="broken file") as info:
        next(batches)
    assert "__next__" in [frame.name for frame in traceback.extract_tb(info.value.__traceback__)]


def test_closing_the_generator_closes_the_source():
    source = Source(9)
    batches = prefetch_to_device(source)
    next(batches)
    batches.close()
    assert source.closed


def test_a_negative_depth_is_refused_at_once():
    with pytest.raises(ValueError, match="depth must be 0 or more batches, got -1"):
        prefetch_to_device([], depth=-1)
