"""Moments of optimizers in bfloat16 and in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.extras.optimizers import compress_moments
from jengine.extras.optimizers.small_state import decode, encode, round_to_bfloat16
from jengine.extras.plan.program_costs import compile_plan
from jengine.model import FunctionalModel, autocast
from jengine.optim import OptimWrapper, build_optim_wrapper
from tests.devices import take_devices
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

RNG = np.random.default_rng(0)
X = RNG.normal(size=(64, 64)).astype("f")
DATA = dict(x=X, y=np.tanh(X @ RNG.normal(size=(64, 1)).astype("f") / 8))
KEY = jax.random.key(0)


def init(key):
    keys = jax.random.split(key)
    return {
        "up": jax.random.normal(keys[0], (64, 256)) / 8,
        "bias": jnp.zeros(256),
        "down": jax.random.normal(keys[1], (256, 1)) / 16,
    }


@autocast
def predict(params, batch):
    return jnp.tanh(batch["x"] @ params["up"] + params["bias"]) @ params["down"]


def loss(params, batch):
    return jnp.square(predict(params, batch) - batch["y"]).mean(axis=1)


def make_config(**changes):
    cfg = dict(
        model=FunctionalModel(init, loss, predict),
        train_dataloader=dict(dataset=dict(type="ArrayDataset", arrays=DATA), batch_size=16),
        train_cfg=dict(by_epoch=False, max_iters=6),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01, state_dtype="int8")),
        default_hooks=dict(logger=None, checkpoint=None),
        randomness=dict(seed=0),
    )
    return {**cfg, **changes}


def moments(state, name):
    """Return the leaves of an optimizer state under a field, by the path below, without scales."""
    leaves = {path: leaf for path, leaf in paths.flatten(state).items() if ".scales." not in path}
    return {path.partition(f".{name}.")[2]: leaf for path, leaf in leaves.items() if f".{name}." in path}


def relative(actual, expected):
    return float(np.linalg.norm(actual - expected) / np.linalg.norm(expected))


# --- Rounding ---


def test_rounding_keeps_the_mean():
    x = jnp.asarray(RNG.normal(size=300).astype("f"))
    keys = jax.random.split(KEY, 2000)
    coded = jax.vmap(lambda key: decode(*encode(x, key, False)))(keys)
    rounded = jax.vmap(lambda key: round_to_bfloat16(x, key).astype("f"))(keys)
    for values, step in ((coded, 0.5), (rounded, 2**-8)):
        assert len(np.unique(values[:, 0])) == 2  # the neighbors above and below
        error = np.abs(np.mean(values, 0) - x) / np.maximum(np.abs(x), 0.01)
        assert error.max() < step * 0.12  # five deviations of a mean of 2000
    np.testing.assert_array_equal(round_to_bfloat16(jnp.array([0.0, 1.0, jnp.inf]), KEY), [0, 1, jnp.inf])


def values_of(codes):
    return np.asarray(decode(codes, jnp.ones((1,))))


def test_codes_are_the_dynamic_trees_of_the_paper():
    signed, squares = values_of(jnp.arange(-127, 128, dtype=jnp.int8)), values_of(jnp.arange(255, dtype=jnp.uint8))
    np.testing.assert_array_equal(signed, -signed[::-1])
    # half the values are in the largest decade, in equal steps
    for values, count in ((signed, 64), (squares, 128)):
        assert (np.diff(values) > 0).all()
        large = values[values > 0.1001]
        np.testing.assert_allclose(large, 0.1 + 0.9 * np.arange(1, count + 1) / count, rtol=1e-5)
        np.testing.assert_allclose(values[(values > 1.001e-4) & (values < 1.001e-3)].max(), 1e-3, rtol=1e-5)
    assert signed[127] == squares[0] == 0
    np.testing.assert_allclose([signed[128], squares[1], squares[2]], [1e-6, 5e-7, 1e-6], rtol=1e-5)


@pytest.mark.parametrize("is_square", [False, True])
def test_each_block_has_a_scale_and_what_a_code_means_stays(is_square):
    every = jnp.arange(0 if is_square else -127, 255 if is_square else 128).astype("uint8" if is_square else "int8")
    x = np.concatenate([values_of(every), [0], 100 * values_of(every)[-44:]])[None]
    decoded = []
    for key in jax.random.split(KEY, 20):
        codes, scales = encode(jnp.asarray(x), key, is_square)
        decoded.append(decode(codes, scales))
        assert (codes.shape, codes.dtype) == ((1, 300), every.dtype)
        np.testing.assert_allclose(scales, [[1, 100]], rtol=1e-6)
    # values between two codes would differ by 10 % and more in some of the trials
    np.testing.assert_allclose(np.median(decoded, 0), x, rtol=2e-5)
    assert np.mean(np.abs(np.array(decoded) - x) > 1e-3 * np.abs(x)) < 1e-3


def test_squares_above_zero_never_become_zero():
    x = jnp.asarray(10.0 ** -RNG.uniform(0, 20, size=(2, 256)).astype("f")).at[0, :9].set(0).at[1, 0].set(1)
    codes = encode(x, KEY, True)[0]
    np.testing.assert_array_equal(np.asarray(codes) == 0, np.asarray(x) == 0)


# --- Updates ---


@pytest.mark.parametrize(
    ("name", "limits"),
    [
        ("AdamW", (0.01, 0.2)),
        ("Muon", (0.15, 0.6)),  # small singular values of the momentum count as much as large ones
        ("Lion", (0.3, 0.7)),  # a sign turns where the momentum is near 0
        ("schedule_free_adamw", (0.01, 0.2)),
    ],
)
@pytest.mark.parametrize("dtype", ["bfloat16", "int8"])
def test_updates_are_near_those_of_float32(name, limits, dtype):
    rate = dict(learning_rate=0.01) if name[0].islower() else dict(lr=0.01)
    params = init(KEY)
    roles = dict(up=dict(role="hidden", fan_in=(0,), fan_out=(1,)), down=dict(role="head"))
    rules = dict(paramwise_cfg=dict(roles=roles)) if name == "Muon" else {}

    def train(**more):
        wrapper = build_optim_wrapper(params, dict(optimizer=dict(type=name, **rate, **more), **rules))
        step = jax.jit(wrapper.apply_gradients)
        state, new = wrapper.init(params), params
        for i in range(10):
            grads = jax.grad(lambda p, i=i: loss(p, DATA).mean())(new)
            new, state = step(grads, state, new, wrapper.hyperparams)
        assert step._cache_size() == 1
        return jax.tree.map(lambda a, b: np.asarray(a - b), new, params), state

    expected, _ = train()
    same, _ = train(state_dtype="float32")
    jax.tree.map(np.testing.assert_array_equal, same, expected)
    actual, state = train(state_dtype=dtype)
    assert 1e-5 < relative(actual["up"], expected["up"]) < limits[dtype == "int8"]
    small = {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.shape == (64, 256) and "schedule" not in name}
    assert small <= ({jnp.dtype("int8"), jnp.dtype("uint8")} if dtype == "int8" else {jnp.dtype(dtype)})


def test_groups_may_keep_float32():
    rules = dict(custom_keys={"up": dict(state_dtype="float32")}, bias_decay_mult=0.0)
    params = {"up": jnp.ones((64, 256)), "other": jnp.ones((64, 256)), "bias": jnp.ones(8)}
    cfg = dict(optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.1, state_dtype="int8"), paramwise_cfg=rules)
    state = build_optim_wrapper(params, cfg).init(params)
    dtypes = {path: leaf.dtype.name for path, leaf in moments(state, "scale_by_adam.nu").items()}
    assert dtypes == {"up": "float32", "other": "uint8", "bias": "float32"}


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (dict(type="SGD", lr=0.1, state_dtype="int8"), ["without moments"]),
        (dict(type="AdamW", lr=0.1, state_dtype="int4"), ["float32", "bfloat16", "got 'int4'"]),
    ],
)
def test_mistakes_are_named(optimizer, words):
    check_refusal(lambda: OptimWrapper(optimizer).init({"w": jnp.ones((64, 256))}), ConfigError, *words)


def test_in_a_chain_of_optax():
    tx = optax.chain(optax.clip(1.0), compress_moments(optax.scale_by_adam(), "int8"), optax.scale(-0.1))
    params = {"w": jnp.ones((16, 300))}
    state = tx.init(params)
    updates, state = tx.update({"w": jnp.full((16, 300), 0.5)}, state, params)
    np.testing.assert_allclose(updates["w"], -0.1, rtol=1e-4)
    assert state[1].inner_state.nu["w"].dtype == jnp.uint8
    assert state[1].scales.nu["w"].shape == (16, 2)


# --- Runs ---


@pytest.mark.parametrize(
    "changes",
    [
        dict(optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01, state_dtype="int8"), accumulative_counts=2)),
        dict(
            optim_wrapper=dict(
                type="AmpOptimWrapper",
                loss_scale="dynamic",
                optimizer=dict(type="AdamW", lr=0.01, state_dtype="bfloat16"),
            ),
            custom_hooks=[dict(type="EMAHook")],
        ),
    ],
    ids=["8 bits and accumulation", "16 bits, loss scaling and averages"],
)
def test_a_resumed_run_continues_to_the_same_bits(tmp_path, changes):
    checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=2)

    def run(name, iters, **more):
        cfg = dict(changes, default_hooks=dict(logger=None, checkpoint=checkpoint), **more)
        return build_runner(tmp_path / name, **make_config(train_cfg=dict(by_epoch=False, max_iters=iters), **cfg)).train()

    expected = run("whole", 6)
    actual = run("rest", 6, resume=tmp_path / "whole" / "iter_2")
    jax.tree.map(np.testing.assert_array_equal, (actual.params, actual.opt_state), (expected.params, expected.opt_state))


def test_codes_and_scales_are_sharded_and_trained_as_on_one_device(tmp_path):
    expected = build_runner(tmp_path / "one", **make_config()).train()
    parallel = dict(type="Pjit", mesh=dict(data=1, fsdp=4), devices=4, fsdp_min_size=16)
    state = build_runner(tmp_path / "many", **make_config(parallel=parallel)).train()
    # where the last bit of a moment decides, it is rounded to the other side
    differences = np.abs(np.asarray(state.params["up"]) - np.asarray(expected.params["up"]))
    assert np.mean(differences > 1e-5) < 1e-3
    assert differences.max() < 1e-3
    leaves = {path: leaf for path, leaf in paths.flatten(state.opt_state).items() if path.endswith("nu.up")}
    assert len(leaves) == 2
    for leaf in leaves.values():
        assert leaf.sharding.shard_shape(leaf.shape) != leaf.shape


def test_a_plan_shows_the_memory():
    def measure(dtype):
        optimizer = dict(type="AdamW", lr=0.01, state_dtype=dtype)
        cfg = make_config(optim_wrapper=dict(optimizer=optimizer), parallel=dict(type="Pjit", devices=1))
        return compile_plan(cfg, training_only=True)["programs"]["update"]["memory"]["optimizer state"]

    up = 64 * 256
    small = 2 * 4 * (256 + 256)  # the moments of the bias, and of 256 x 1 numbers
    sizes = {dtype: measure(dtype) for dtype in ("float32", "bfloat16", "int8")}
    assert sizes["float32"] == pytest.approx(2 * 4 * up + small, abs=64)
    assert sizes["bfloat16"] == pytest.approx(2 * 2 * up + small, abs=64)
    scales = 2 * 4 * (64 + 256 + 256)  # one for each row, and those without effect
    assert sizes["int8"] == pytest.approx(2 * up + small + scales, abs=64)


@pytest.mark.parametrize("spec", [PartitionSpec("fsdp", None), PartitionSpec(None, "fsdp")], ids=str)
def test_on_explicit_axes_blocks_may_be_divided(spec):
    mesh = jax.make_mesh((4,), ("fsdp",), axis_types=(AxisType.Explicit,), devices=take_devices(4))
    params = {"w": jnp.ones((16, 512))}
    grads = {"w": jnp.asarray(RNG.normal(size=(16, 512)).astype("f"))}
    tx = compress_moments(optax.scale_by_adam(), "int8")

    def run(params, grads):
        state = tx.init(params)
        for _ in range(2):
            updates, state = tx.update(grads, state)
        return updates, state

    expected, _ = jax.jit(run)(params, grads)
    with jax.set_mesh(mesh):
        placed = jax.device_put((params, grads), NamedSharding(mesh, spec))
        updates, state = jax.jit(run)(*placed)
    assert state.inner_state.nu["w"].sharding.spec == spec
    np.testing.assert_allclose(updates["w"], expected["w"], rtol=1e-5)


def test_the_first_state_is_computed_by_the_device_and_not_by_the_compiler():
    # which takes minutes to compute codes of zeros; without a barrier it may
    init = compress_moments(optax.scale_by_adam(), "int8").init
    program = jax.jit(init).lower({"w": jax.ShapeDtypeStruct((64, 256), jnp.float32)}).as_text()
    assert "optimization_barrier" in program
