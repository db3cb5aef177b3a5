import traceback

import jax
import numpy as np
import pytest

from jengine.data import prefetch_to_device


class Source:
    def __init__(self, size, fail_at=None):
        self.size = size
        self.fail_at = fail_at
        self.yielded = 0
        self.closed = False

    def __iter__(self):
        return self

    def __next__(self):
        if self.yielded == self.fail_at:
            raise RuntimeError("broken file")
        if self.yielded == self.size:
            raise StopIteration
        self.yielded += 1
        return {"x": np.full(2, self.yielded)}

    def close(self):
        self.closed = True


def test_batches_arrive_on_the_device_in_order():
    batches = list(prefetch_to_device(Source(4)))
    assert all(isinstance(batch["x"], jax.Array) for batch in batches)
    assert [int(batch["x"][0]) for batch in batches] == [1, 2, 3, 4]


@pytest.mark.parametrize("depth", [0, 1, 2])
def test_depth_batches_are_sent_ahead_of_the_current_one(depth):
    source = Source(10)
    batches = prefetch_to_device(source, depth=depth)
    assert source.yielded == 0
    next(batches)
    assert source.yielded == depth + 1
    next(batches)
    assert source.yielded == depth + 2


def test_all_batches_arrive_if_there_are_fewer_than_the_depth():
    assert len(list(prefetch_to_device(Source(1), depth=3))) == 1
    assert list(prefetch_to_device([], depth=3)) == []


def test_put_is_called_once_with_the_whole_batch():
    seen = []
    list(prefetch_to_device(Source(3), put=lambda batch: seen.append(set(batch))))
    assert seen == [{"x"}] * 3


def test_an_exception_of_the_source_is_raised_after_the_batches_before_it_with_its_traceback():
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
