"""Test that BatchStream takes several batches of the same shapes at a time, and raises errors in order."""

import numpy as np
import pytest

from jengine.data import BatchStream


def batch(value, size=2, dtype=np.float32):
    return {"x": np.full(size, value, dtype)}


def values(batches):
    return [int(batch["x"][0]) for batch in batches]


def test_batches_are_in_order_with_fewer_at_the_end():
    stream = BatchStream(batch(i) for i in range(5))
    assert [values(stream.take(2)) for _ in range(4)] == [[0, 1], [2, 3], [4], []]


def test_batches_of_another_shape_dtype_or_key_are_taken_separately():
    others = [batch(2, size=3), batch(3, dtype=np.int32), {"x": np.zeros(2, np.int32), "y": np.zeros(2)}]
    stream = BatchStream([batch(0), batch(1), *others])
    assert [len(stream.take(4)) for _ in range(5)] == [2, 1, 1, 1, 0]


def test_an_error_of_the_source_is_raised_after_the_batches_before_it():
    def source():
        yield batch(0)
        yield batch(1)
        raise OSError("the disk is gone")

    stream = BatchStream(source())
    assert values(stream.take(4)) == [0, 1]
    with pytest.raises(OSError, match="the disk is gone"):
        stream.take(4)


def test_the_source_is_closed_with_the_stream():
    closed = []

    def source():
        try:
            yield batch(0)
            yield batch(1)
        finally:
            closed.append(True)

    stream = BatchStream(source())
    stream.take(1)
    stream.close()
    assert closed == [True]


def test_names_of_different_lengths_do_not_separate_batches():
    batches = [{"x": np.zeros(1), "name": np.array([name])} for name in ("a", "bc")]
    assert len(BatchStream(batches).take(2)) == 2


def test_each_batch_is_checked_once_and_its_form_goes_with_it():
    checked = []
    stream = BatchStream(
        [batch(0), batch(1), batch(2, size=3), batch(3)], lambda b: checked.append(values([b])) or b["x"].shape
    )
    assert [len(stream.take(3)) for _ in range(4)] == [2, 1, 1, 0]
    assert checked == [[0], [1], [2], [3]]
