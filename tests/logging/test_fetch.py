"""Many scalars in one transfer: values, one small program for any number of them, local copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jengine.logging import fetch


@pytest.fixture
def transfers(monkeypatch):
    """The arguments of each jax.device_get, on a device whose memory is not the host's."""
    monkeypatch.setattr(fetch, "on_host", lambda array: False)
    calls = []
    get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda arrays: calls.append(arrays) or get(arrays))
    return calls


@pytest.mark.parametrize("number", [0, 1, 2, 31, 32, 33, 100])
def test_any_number_of_scalars_comes_in_order_by_one_transfer(number, transfers):
    dtypes = [jnp.float32, jnp.int32, jnp.bfloat16, jnp.bool_]
    arrays = [jnp.asarray(i, dtypes[i % 4]) for i in range(number)]
    found = [value.item() for value in fetch.fetch_arrays(arrays)]
    assert found == [float(i if i % 4 != 3 else 1) for i in range(number)]
    assert len(transfers) == (1 if number else 0)


def test_on_a_cpu_arrays_are_read_without_a_transfer(monkeypatch):
    monkeypatch.setattr(jax, "device_get", None)
    arrays = [jnp.float32(1.5), jnp.arange(3), jnp.bfloat16(2.0)]
    assert [value.tolist() for value in fetch.fetch_arrays(arrays)] == [1.5, [0, 1, 2], 2.0]


def test_series_come_in_the_same_transfer_as_scalars(transfers):
    arrays = [jnp.float32(1.5), jnp.arange(3.0), jnp.float32(2.5), jnp.arange(3.0) + 4]
    values = [value.tolist() for value in fetch.fetch_arrays(arrays)]
    assert values == [1.5, [0.0, 1.0, 2.0], 2.5, [4.0, 5.0, 6.0]]
    assert len(transfers) == 1


def test_one_program_serves_any_number(transfers):
    fetch._stack.clear_cache()
    for number in (2, 10, 32, 50):
        fetch.fetch_arrays([jnp.float32(i) for i in range(number)])
    assert fetch._stack._cache_size() == 1


def test_of_replicated_arrays_one_local_copy_is_fetched(transfers):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    arrays = [jax.device_put(np.float32(i), replicated) for i in range(3)]
    assert fetch.fetch_arrays(arrays) == [0.0, 1.0, 2.0]
    assert all(len(array.sharding.device_set) == 1 for array in transfers[0])
