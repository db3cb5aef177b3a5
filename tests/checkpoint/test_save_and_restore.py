import base64
import json
import logging
import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jengine.checkpoint import (
    CheckpointMismatchError,
    arrays,
    list_arrays,
    load,
    load_params,
    read_meta,
    restore,
)
from jengine.checkpoint.manifest import seal

from .conftest import make_meta, make_state


def assert_equal(actual, expected):
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        if jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))


def make_mesh(devices):
    return jax.make_mesh(
        (devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices]
    )


def test_a_restored_state_equals_the_saved_one_bit_for_bit(checkpointer, tmp_path):
    state = make_state(0.1)
    path = checkpointer.save(
        tmp_path / "epoch_1", state, make_meta(3, schedule=[0.1, np.float32(0.3)])
    )
    checkpointer.wait()
    restored, meta = restore(path, state)
    assert_equal(restored, state)
    assert isinstance(restored["opt_state"][1][0], optax.ScaleByAdamState)
    assert meta == {"meta": {"iter": 3, "epoch": 1}, "schedule": [0.1, float(np.float32(0.3))]}


def test_an_nnx_state_is_stored_as_its_arrays(checkpointer, tmp_path):
    params = nnx.state(nnx.Linear(2, 3, rngs=nnx.Rngs(0)), nnx.Param)
    path = checkpointer.save(tmp_path / "epoch_1", {"params": params}, make_meta())
    checkpointer.wait()
    assert sorted(list_arrays(path)) == ["params.bias", "params.kernel"]
    assert_equal(restore(path, {"params": params})[0], {"params": params})
    plain = nnx.to_pure_dict(params)
    assert_equal(restore(path, {"params": plain})[0], {"params": plain})


def test_the_random_stream_continues(checkpointer, tmp_path):
    state = {"rng": jax.random.split(jax.random.key(5, impl="rbg"))[0]}
    path = checkpointer.save(tmp_path / "iter_1", state, make_meta())
    checkpointer.wait()
    shapes = jax.eval_shape(lambda: state)
    restored, _ = restore(path, shapes)
    expected, actual = (
        jax.random.normal(state["rng"], (4,)),
        jax.random.normal(restored["rng"], (4,)),
    )
    np.testing.assert_array_equal(actual, expected)


@pytest.mark.parametrize(
    "size", [10_000, 2_000_000]
)  # written as NumPy arrays, written as JAX arrays
def test_the_state_may_be_donated_as_soon_as_save_returns(checkpointer, tmp_path, size):
    state = {"params": jnp.arange(size, dtype=jnp.float32)}
    expected = np.arange(size, dtype=np.float32)
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    path = checkpointer.save(tmp_path / "iter_1", state, make_meta())
    step(state)["params"].block_until_ready()
    checkpointer.wait()
    np.testing.assert_array_equal(load(path).state["params"], expected)


@pytest.mark.parametrize("size", [10_000, 2_000_000])
def test_the_next_step_reuses_the_memory_of_a_state_that_is_being_saved(
    checkpointer, tmp_path, size
):
    state = {"params": jnp.arange(size, dtype=jnp.float32)}
    address = state["params"].unsafe_buffer_pointer()
    step = jax.jit(lambda s: jax.tree.map(lambda x: x * 0 - 1, s), donate_argnums=0)
    checkpointer.save(tmp_path / "iter_1", state, make_meta())
    assert step(state)["params"].unsafe_buffer_pointer() == address


@pytest.mark.parametrize(
    "size", [3, 2_000_001]
)  # an odd number of bfloat16 values, so that the next array would not be aligned
def test_every_dtype_of_a_small_and_a_large_state_is_restored(checkpointer, tmp_path, size):
    noise = np.random.default_rng(0).standard_normal(size)
    state = {
        "half": jnp.asarray(noise, jnp.bfloat16),
        "flags": jnp.asarray(noise > 0),
        "params": {"kernel": jnp.asarray(noise, jnp.float32), "bias": None},
        "bytes": jnp.asarray(noise * 9, jnp.int8),
        "step": jnp.int32(-3),
        "rng": jax.random.split(jax.random.key(1), 3),
        "on_host": noise,
        "counts": np.arange(size),
    }
    path = checkpointer.save(tmp_path / "iter_1", state, make_meta())
    checkpointer.wait()
    restored, _ = restore(path, state)
    assert_equal(restored, state)


def test_arrays_without_elements_are_restored_with_their_shapes(checkpointer, tmp_path):
    state = {
        "params": {"a": jnp.zeros((6, 0)), "b": jnp.zeros((0, 3), jnp.bfloat16), "w": jnp.ones(2)},
        "keys": jax.random.split(jax.random.key(0), 0),
    }
    checkpointer.save(tmp_path / "epoch_1", state, make_meta())
    checkpointer.wait()
    restored, _ = restore(tmp_path / "epoch_1", state)
    assert jax.tree.map(lambda x: (x.shape, x.dtype), restored) == jax.tree.map(
        lambda x: (x.shape, x.dtype), state
    )
    loaded = load(tmp_path / "epoch_1").params
    assert {name: (x.shape, x.dtype.name) for name, x in loaded.items()} == {
        "a": ((6, 0), "float32"), "b": ((0, 3), "bfloat16"), "w": ((2,), "float32"),
    }  # fmt: skip
    params, _ = load_params(tmp_path / "epoch_1", state["params"])
    np.testing.assert_array_equal(params["w"], np.ones(2))


@pytest.mark.parametrize("size", [10, 2_000_000])
def test_a_host_array_may_be_overwritten_as_soon_as_save_returns(checkpointer, tmp_path, size):
    state = {"params": jnp.ones(size), "counts": np.arange(size)}
    path = checkpointer.save(tmp_path / "iter_1", state, make_meta())
    state["counts"][:] = -1
    checkpointer.wait()
    np.testing.assert_array_equal(load(path).state["counts"], np.arange(size))


def test_a_checkpoint_with_compressed_arrays_is_readable(checkpointer, tmp_path, state):
    path = pathlib.Path(checkpointer.save(tmp_path / "iter_1", make_state(9.0), make_meta()))
    checkpointer.wait()
    stored = jax.tree.map(
        lambda leaf: jax.random.key_data(leaf) if arrays.is_key(leaf) else leaf, state
    )
    ocp.PyTreeCheckpointer(use_compression=True).save(path / "state", stored, force=True)
    (path / "manifest.json").unlink()
    seal(path, run="", is_latest=True, iteration=3)
    restored, _ = restore(path, state)
    assert_equal(restored, state)


@pytest.mark.parametrize(
    ("other", "written"),
    [
        (lambda: jnp.ones(3), []),
        (lambda: jnp.ones(2**20), []),
        (
            lambda: jax.device_put(np.ones(8), NamedSharding(make_mesh(8), PartitionSpec("data"))),
            ["bias", "other"],
        ),
    ],
    ids=["small", "large", "several devices"],
)
def test_a_state_of_one_cpu_is_written_without_shardings(checkpointer, tmp_path, other, written):
    path = checkpointer.save(
        tmp_path / "iter_1", {"bias": jnp.ones(3), "other": other()}, make_meta()
    )
    checkpointer.wait()
    file = pathlib.Path(path) / "state" / "_sharding"
    names = json.loads(file.read_text()) if file.exists() else []
    assert sorted(base64.b64decode(name).decode() for name in names) == written


@pytest.mark.parametrize("devices", [8, 4, 1])
def test_a_state_saved_on_eight_devices_restores_on_fewer(checkpointer, tmp_path, devices):
    spec = PartitionSpec("data")
    value = np.arange(32, dtype=np.float32).reshape(8, 4)
    saved = jax.device_put(value, NamedSharding(make_mesh(8), spec))
    path = checkpointer.save(tmp_path / "iter_1", {"params": {"kernel": saved}}, make_meta())
    checkpointer.wait()
    sharding = NamedSharding(make_mesh(devices), spec)
    target = {"params": {"kernel": jax.ShapeDtypeStruct((8, 4), jnp.float32, sharding=sharding)}}
    restored, _ = restore(path, target)
    assert restored["params"]["kernel"].sharding == sharding
    np.testing.assert_array_equal(restored["params"]["kernel"], value)


def test_another_process_reads_a_checkpoint_without_config_or_devices(run_python, checkpointer, tmp_path):
    sharding = NamedSharding(make_mesh(8), PartitionSpec())
    checkpointer.save(tmp_path / "epoch_1", jax.device_put(make_state(2.0), sharding), make_meta())
    checkpointer.wait()
    code = (
        "import sys, jengine.checkpoint as c\n"
        "found = c.load(sys.argv[1])\n"
        "print(float(found.params['head'][1][0]), found.params['backbone']['bias'].dtype, found.meta['meta']['iter'],"
        " type(found.state['step']).__name__)"
    )
    env = {
        **os.environ,
        "XLA_FLAGS": f"{os.environ['XLA_FLAGS']} --xla_force_host_platform_device_count=2",
    }
    result = run_python(code, tmp_path, env=env)
    assert result.stdout == "-2.0 bfloat16 3 ndarray\n", result.stderr
    assert result.stderr == ""


def test_shapes_and_dtypes_are_listed_by_path(checkpointer, tmp_path):
    path = checkpointer.save(tmp_path / "epoch_1", make_state(), make_meta())
    checkpointer.wait()
    structs = list_arrays(path)
    assert (structs["params.backbone.kernel"].shape, structs["params.backbone.kernel"].dtype) == (
        (8, 4),
        jnp.float32,
    )
    assert structs["hook_state.EMAHook.params.head.1"].shape == (2,)


def test_a_checkpoint_is_replaced_by_a_newer_one_with_the_same_name(checkpointer, tmp_path):
    for value in (1.0, 2.0):
        path = checkpointer.save(tmp_path / "best", make_state(value), make_meta(int(value)))
    checkpointer.wait()
    assert load(path).params["head"][0][0] == 2.0
    assert read_meta(path)["meta"]["iter"] == 2
    assert sorted(os.listdir(tmp_path)) == ["best", "last_checkpoint"]


def test_a_best_checkpoint_is_not_pointed_to_and_evicts_only_what_is_given(checkpointer, tmp_path):
    for number in (1, 2):
        checkpointer.save(tmp_path / f"epoch_{number}", make_state(), make_meta(number))
    checkpointer.save(
        tmp_path / "best_acc",
        make_state(),
        make_meta(2),
        latest=False,
        evict=["epoch_1", "missing"],
    )
    checkpointer.wait()
    assert sorted(os.listdir(tmp_path)) == ["best_acc", "epoch_2", "last_checkpoint"]
    assert (tmp_path / "last_checkpoint").read_text() == "epoch_2"


def test_deleting_waits_for_the_save_in_progress(checkpointer, tmp_path):
    path = checkpointer.save(tmp_path / "epoch_1", make_state(), make_meta())
    checkpointer.delete(path)
    checkpointer.delete(path)  # already deleted: nothing to do
    assert os.listdir(tmp_path) == ["last_checkpoint"]


def test_a_target_with_other_shapes_is_refused_with_a_table_of_paths(checkpointer, tmp_path, state):
    path = checkpointer.save(tmp_path / "epoch_1", state, make_meta())
    checkpointer.wait()
    other = make_state()
    other["params"]["backbone"] = {"kernel": jnp.ones((8, 5)), "offset": jnp.ones(4)}
    other["step"] = jnp.float32(0)
    with pytest.raises(CheckpointMismatchError) as caught:
        restore(path, other)
    report = caught.value.report
    assert report.missing == ("params.backbone.offset",)
    assert report.unexpected == ("params.backbone.bias",)
    assert report.mismatched == {
        "params.backbone.kernel": ("float32[8,4]", "float32[8,5]"),
        "step": ("int32[]", "float32[]"),
    }
    restored, _ = restore(path, state)
    assert_equal(restored, state)


def test_items_that_are_not_in_the_target_are_ignored(checkpointer, tmp_path, state):
    path = checkpointer.save(tmp_path / "epoch_1", state, make_meta())
    checkpointer.wait()
    restored, _ = restore(path, {"params": state["params"]})
    assert_equal(restored, {"params": state["params"]})


def test_saving_prints_and_logs_nothing(checkpointer, tmp_path, state, caplog, capfd):
    with caplog.at_level(logging.DEBUG, logger="absl"):
        path = checkpointer.save(tmp_path / "epoch_1", state, make_meta())
        checkpointer.wait()
        restore(path, state)
    assert [record.message for record in caplog.records if "orbax" in record.pathname] == []
    assert capfd.readouterr() == ("", "")


def test_the_metadata_of_a_checkpoint_is_plain_json(checkpointer, tmp_path, state):
    path = checkpointer.save(
        tmp_path / "epoch_1", state, make_meta(7, best=float("-inf"), ids=(1, 2))
    )
    checkpointer.wait()
    with open(os.path.join(path, "meta.json")) as file:
        assert json.load(file) == {
            "meta": {"iter": 7, "epoch": 1},
            "best": {"$float": "-Infinity"},
            "ids": [1, 2],
        }


def test_what_is_not_finite_is_written_as_json_and_restored_as_it_was(
    checkpointer, tmp_path, state
):
    history = [0.5, float("nan"), float("inf")]
    path = checkpointer.save(
        tmp_path / "epoch_1", state, make_meta(7, hub={"loss": history, "name": "NaN"})
    )
    checkpointer.wait()
    text = pathlib.Path(path, "meta.json").read_text()
    written = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is not JSON"))
    assert written["hub"] == {
        "loss": [0.5, {"$float": "NaN"}, {"$float": "Infinity"}],
        "name": "NaN",
    }
    restored = read_meta(path)["hub"]
    np.testing.assert_array_equal(restored["loss"], history)
    assert restored["name"] == "NaN"
