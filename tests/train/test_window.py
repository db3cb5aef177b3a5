import jax.numpy as jnp
import numpy as np
import pytest
from jengine.train.window import stack_batches


@pytest.mark.parametrize("axis", [0, 1])
def test_batches_are_stacked_along_an_axis(axis):
    batches = [dict(x=np.full((2, 3), i, np.float32), y=np.full(2, i, np.int8), n=np.int32(i)) for i in range(3)]
    stacked = stack_batches(batches, 5, axis)
    assert {name: (leaf.shape, leaf.dtype) for name, leaf in stacked.items()} == {
        "x": (((5, 2, 3), (2, 5, 3))[axis], np.float32),
        "y": (((5, 2), (2, 5))[axis], np.int8),
        "n": ((5,), np.int32),
    }
    for i, batch in enumerate(batches):
        for name, leaf in batch.items():
            np.testing.assert_array_equal(np.take(stacked[name], i, min(axis, leaf.ndim)), leaf)


@pytest.mark.parametrize("axis", [0, 1])
def test_device_arrays_and_trees_are_stacked_too(axis):
    batches = [(jnp.full((2,), i), [np.full((2, 1), i)]) for i in range(2)]
    first, (second,) = stack_batches(batches, 3, axis)
    assert first.shape == ((3, 2), (2, 3))[axis]
    assert second.shape == ((3, 2, 1), (2, 3, 1))[axis]
    assert np.take(np.asarray(first), 1, axis).tolist() == [1, 1]
