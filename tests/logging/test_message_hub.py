"""Test the message hub: named hubs, pending device scalars, infos, saving."""

import gc
import json
import logging
import weakref

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from jengine.logging import MessageHub, pending_scalars


@pytest.fixture
def hub():
    return MessageHub("test")


@pytest.fixture
def transfers(monkeypatch):
    """Record the arrays of each transfer."""
    calls = []
    fetch = pending_scalars.fetch_arrays
    monkeypatch.setattr(
        pending_scalars, "fetch_arrays", lambda arrays: (calls.append(arrays) if arrays else None) or fetch(arrays)
    )
    return calls


@pytest.fixture
def no_instances(monkeypatch):
    monkeypatch.setattr(MessageHub, "_instances", {})


@pytest.mark.usefixtures("no_instances")
def test_each_name_has_one_hub():
    first = MessageHub.get_instance("first")
    second = MessageHub.get_instance("second")
    assert MessageHub.get_instance("first") is first
    assert second is not first
    assert first.name == first.instance_name == "first"
    assert MessageHub.get_current_instance() is second


@pytest.mark.usefixtures("no_instances")
def test_current_hub_exists_without_a_run():
    assert MessageHub.get_current_instance() is MessageHub.get_instance("jengine")


def test_scalars_keep_their_history(hub):
    for value in range(1, 11):
        hub.update_scalar("train/loss", value)
    assert hub.get_scalar("train/loss").mean(4) == 8.5  # (7 + 8 + 9 + 10) / 4
    assert hub.get_scalar("train/loss").current() == 10


def test_pending_device_values_are_fetched_in_one_transfer(hub, transfers):
    for step in range(40):
        hub.update_scalars({"train/loss": jnp.float32(step), "train/acc": jnp.float32(-step)})
        hub.update_scalar("train/time", 0.5)
    assert transfers == []
    np.testing.assert_array_equal(hub.get_scalar("train/loss").data[0], np.arange(40))
    assert len(transfers) == hub.fetches == 1
    np.testing.assert_array_equal(hub.get_scalar("train/acc").data[0], -np.arange(40))
    np.testing.assert_array_equal(hub.log_scalars["train/time"].data[0], np.full(40, 0.5))
    assert len(transfers) == hub.fetches == 1


def test_updates_do_not_transfer_to_the_host(hub):
    value = jax.jit(lambda x: x + 1)(jnp.float32(1))
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        hub.update_scalar("train/loss", value)
    assert hub.get_scalar("train/loss").current() == 2


def test_host_numbers_need_no_transfer(hub, transfers):
    hub.update_scalars({"a": 1.0, "b": np.float32(2), "c": np.ones((1, 1)), "d": True})
    assert [hub.get_scalar(key).current() for key in "abcd"] == [1, 2, 1, 1]
    assert transfers == []
    assert hub.fetches == 0


def test_host_and_device_values_of_a_key_keep_their_order(hub):
    for value in (1.0, jnp.float32(2), 3, jnp.int32(4), np.float32(5), jnp.bfloat16(6), jnp.ones(1)):
        hub.update_scalar("x", value)
    np.testing.assert_array_equal(hub.get_scalar("x").data[0], [1, 2, 3, 4, 5, 6, 1])


def test_values_replicated_over_devices_are_fetched(hub):
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    replicated = NamedSharding(mesh, PartitionSpec())
    for value in range(3):
        hub.update_scalar("x", jax.device_put(np.float32(value), replicated))
    hub.update_scalar("x", jnp.float32(3))
    np.testing.assert_array_equal(hub.get_scalar("x").data[0], [0, 1, 2, 3])
    assert hub.fetches == 1


def test_pending_values_are_fetched_at_capacity(transfers):
    hub = MessageHub("test", capacity=4)
    for value in range(10):
        hub.update_scalar("x", jnp.float32(value))
    assert len(transfers) == hub.fetches == 2
    np.testing.assert_array_equal(hub.get_scalar("x").data[0], np.arange(10))


def test_flush_without_pending_values_does_nothing(hub, transfers):
    hub.flush()
    assert transfers == []
    assert hub.fetches == 0


def test_device_error_is_raised_once(hub):
    value = jnp.float32(1) + 1
    hub.update_scalars({"x": value, "y": jnp.float32(1)})
    value.delete()
    with pytest.raises(RuntimeError, match="deleted") as caught:
        hub.flush()
    assert any("['x'] were logged from donated arrays" in note for note in caught.value.__notes__)
    hub.update_scalar("x", 2.0)
    assert hub.get_scalar("x").data[0].tolist() == [2.0]


def test_counts_weight_the_mean(hub):
    hub.update_scalars({"x": {"value": 6.0, "count": 3}, "y": 1.0})
    hub.update_scalar("x", 4.0)
    assert hub.get_scalar("x").mean() == 2.5  # (6 + 4) / (3 + 1)
    with pytest.raises(ValueError, match="count"):
        hub.update_scalar("x", 1.0, count=0)


def test_infos_hold_the_latest_value(hub):
    hub.update_info("iter", 1)
    hub.update_info_dict({"iter": 2, "meta": {"classes": ["a"]}})
    assert hub.get_info("iter") == 2
    assert hub.runtime_info == {"iter": 2, "meta": {"classes": ["a"]}}
    assert hub.get_info("missing") is None
    assert hub.get_info("missing", 7) == 7
    assert hub.pop_info("iter") == 2
    assert hub.pop_info("iter", "gone") == "gone"
    assert "iter" not in hub.runtime_info


def test_hub_can_be_saved_and_restored_through_json(hub):
    for value in range(3):
        hub.update_scalar("train/loss", jnp.float32(value))
    hub.update_scalar("private", 1, resumed=False)
    hub.update_info("best", np.float32(0.5))
    hub.update_info("kept", (5, np.int64(10)))
    hub.update_info("secret", 1, resumed=False)
    state = json.loads(json.dumps(hub.state_dict()))
    assert hub.fetches == 1

    restored = MessageHub("restored")
    restored.update_scalar("train/loss", 99)
    restored.update_info("seed", 3)
    restored.load_state_dict(state)
    assert restored.get_scalar("train/loss").data[0].tolist() == [0, 1, 2]
    assert restored.runtime_info == {"seed": 3, "best": 0.5, "kept": [5, 10]}
    assert "private" not in restored.log_scalars


def test_keys_marked_as_not_resumed_are_not_restored(hub):
    hub.update_info("host", "old")
    hub.update_scalar("x", 1)
    restored = MessageHub("restored")
    restored.update_info("host", "new", resumed=False)
    restored.update_scalar("x", 2, resumed=False)
    restored.load_state_dict(hub.state_dict())
    assert restored.get_info("host") == "new"
    assert restored.get_scalar("x").data[0].tolist() == [2]


def test_state_dict_does_not_grow_with_the_run(hub):
    for value in range(300):
        hub.update_scalar("x", value)
    size = len(json.dumps(hub.state_dict()["log_scalars"]["x"]["values"]).split(","))
    for value in range(3000):
        hub.update_scalar("x", value)
    assert len(json.dumps(hub.state_dict()["log_scalars"]["x"]["values"]).split(",")) == size == 256


@pytest.mark.parametrize("value", [np.ones(3), object(), {"a": [np.ones(2)]}, {1: "int keys would become strings"}])
def test_infos_that_json_cannot_store_are_skipped_with_a_warning(hub, value):
    records = []
    handler = logging.Handler()
    handler.emit = records.append
    logger = logging.getLogger("jengine")
    logger.addHandler(handler)
    try:
        hub.update_info("val/matrix", value)
        hub.update_info("epoch", 1)
        assert hub.state_dict()["runtime_info"] == {"epoch": 1}
    finally:
        logger.removeHandler(handler)
    assert "info 'val/matrix' is not saved" in records[0].getMessage()


def test_new_instance_of_the_same_name_is_empty():
    earlier = MessageHub.get_instance("test_new")
    earlier.update_scalar("train/loss", 1.0)
    hub = MessageHub.new_instance("test_new")
    assert hub is not earlier
    assert hub.log_scalars == {}
    assert MessageHub.get_instance("test_new") is MessageHub.get_current_instance() is hub


def test_snapshot_is_unaffected_by_later_updates():
    hub = MessageHub("test")
    hub.update_scalar("train/loss", jnp.float32(1.0))
    hub.update_info("eta", 5)
    snapshot = hub.snapshot()
    hub.update_scalar("train/loss", jnp.float32(2.0))
    hub.update_info("eta", 4)
    snapshot.flush()
    assert (snapshot.get_scalar("train/loss").current(), snapshot.get_info("eta")) == (1.0, 5)
    assert hub.get_scalar("train/loss").data[0].tolist() == [1.0, 2.0]


def test_before_read_is_called_before_the_hub_is_read():
    hub = MessageHub("test")
    hub.update_scalar("x", jnp.float32(1.0))
    snapshot = hub.snapshot()
    hub.before_read = snapshot.flush
    hub.update_scalar("x", 2.0)
    assert hub.get_scalar("x").data[0].tolist() == [1.0, 2.0]


def read(hub):
    return {key: history.data[0].tolist() for key, history in hub.log_scalars.items()}


def test_a_record_holds_the_metrics_rates_and_times_of_an_iteration(hub, transfers):
    for i in range(3):
        hub.start_iteration(i)
        hub.record({"loss": jnp.float32(i), "acc": np.float32(-i)}, {"lr": 0.1 * i}, data_time=0.5, seconds=2.0)
    assert transfers == []
    assert read(hub) == {
        "train/lr": [0.0, 0.1, 0.2], "train/loss": [0.0, 1.0, 2.0], "train/acc": [0.0, -1.0, -2.0],
        "train/data_time": [0.5] * 3, "train/time": [2.0] * 3,
    }  # fmt: skip
    assert len(transfers) == 1


def test_a_snapshot_of_a_chunk_has_the_iterations_so_far():
    hub, histories = MessageHub("test"), []
    chunk = {"loss": jnp.arange(4.0), "norm": jnp.arange(4.0)}
    for i in range(4):
        hub.iteration = i
        hub.update_scalar("noise", float(i))  # by a hook that is called ahead
    for i in range(4):
        hub.iteration = i
        hub.record(chunk, {"lr": float(i)}, 0.0, 0.0, i, {"norm": np.array([False, True, False, True])})
        if i in (0, 2, 3):
            snapshot = hub.snapshot()
            snapshot.flush()
            histories.append({k.removeprefix("train/"): v for k, v in read(snapshot).items() if "time" not in k})
    assert histories == [
        {"lr": [0.0], "loss": [0.0], "noise": [0.0]},
        {"lr": [0.0, 1.0, 2.0], "loss": [0.0, 1.0, 2.0], "norm": [1.0], "noise": [0.0, 1.0, 2.0]},
        {"lr": [0.0, 1.0, 2.0, 3.0], "loss": [0.0, 1.0, 2.0, 3.0], "norm": [1.0, 3.0], "noise": [0.0, 1.0, 2.0, 3.0]},
    ]


def test_many_pending_scalars_are_fetched_when_an_iteration_starts():
    hub = MessageHub("test", capacity=40)
    for start, fetches in ((0, 0), (15, 0), (30, 1)):
        hub.start_iteration(start)
        assert hub.fetches == fetches  # fetches from half of the capacity on
        for _ in range(15):
            hub.update_scalar("x", jnp.float32(0))
    snapshot = hub.snapshot()
    snapshot.flush()
    assert snapshot.get_scalar("x").updates == 45


@pytest.mark.usefixtures("only_new_garbage")
def test_the_hub_of_a_run_is_freed_with_the_run_unless_it_is_the_newest():
    first, kept = MessageHub.new_instance("first run"), MessageHub.get_instance("without a run")
    assert MessageHub.get_instance("first run") is first
    reference = weakref.ref(first)
    del first
    assert MessageHub.get_instance("first run") is reference()
    second = MessageHub.new_instance("second run")
    gc.collect()
    assert reference() is None
    assert MessageHub.get_current_instance() is second
    assert MessageHub.get_instance("without a run") is kept
