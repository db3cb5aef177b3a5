import functools
import json
import pathlib
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from jengine.extras.optimizers.averages import CosineEMA, ExpMomentumEMA
from jengine.train import (
    AVERAGES,
    Average,
    ExponentialMovingAverage,
    MomentumAnnealingEMA,
    StochasticWeightAverage,
)

DATA = pathlib.Path(__file__).parent.parent / "data" / "parity"


@pytest.fixture(autouse=True)
def strict_promotion_and_warnings():
    with (
        jax.numpy_dtype_promotion("strict"),
        jax.numpy_rank_promotion("raise"),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("error")
        yield


def run_updates(average, values):
    """Return the average after each update."""
    state = average.init(jnp.float32(0))
    update = jax.jit(average.update, donate_argnums=0)
    results = []
    for value in values:
        state = update(state, jnp.float32(value))
        results.append(float(state.params))
    assert state.steps == len(values)
    assert state.steps.dtype == jnp.int32
    return results


@pytest.mark.parametrize("name", ["ema", "swa", "annealing"])
def test_recorded_mmengine_averages_are_reproduced(name):
    # recorded from MMEngine 0.10.7 on PyTorch 2.13
    record = json.loads((DATA / f"ema_{name}.json").read_text())
    arrays = np.load(DATA / f"ema_{name}.npz")
    average = AVERAGES.build(dict(type=record["type"], **record["kwargs"]))
    update = jax.jit(average.update)
    state = average.init(jnp.asarray(arrays["source"][0]))
    for source, expected in zip(arrays["source"], arrays["averaged"], strict=True):
        state = update(state, jnp.asarray(source))
        np.testing.assert_allclose(state.params, expected, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("average", "expected"),
    [  # computed by MMEngine 0.10.7 (ExpMomentumEMA: MMDetection 3.3) for the parameters 1 to 6
        (ExponentialMovingAverage(momentum=0.1), [1, 1.1, 1.29, 1.561, 1.9049, 2.31441]),
        (ExponentialMovingAverage(momentum=0.1, interval=2), [1, 1, 1.2, 1.2, 1.58, 1.58]),
        (StochasticWeightAverage(), [1, 1.5, 2, 2.5, 3, 3.5]),
        (StochasticWeightAverage(interval=2), [1, 1, 2, 2, 3, 3]),
        (MomentumAnnealingEMA(), [1, 1.9900990099, 2.9801980198, 3.9702970297, 4.9603960396, 5.9504950495]),
        (MomentumAnnealingEMA(momentum=0.3, gamma=1), [1, 1.5, 2, 2.6, 3.32, 4.124]),
        (MomentumAnnealingEMA(gamma=10), [1, 1.90909, 2.81818, 3.72727, 4.63636, 5.54545]),
        (
            ExpMomentumEMA(momentum=0.1, gamma=2),
            [1, 1.4310914971, 1.9030460723, 2.3681541334, 2.825770278, 3.2854252832],
        ),
    ],
)
def test_averages_of_one_to_six_match_mmengine(average, expected):
    np.testing.assert_allclose(run_updates(average, range(1, 7)), expected, rtol=2e-6)


def test_the_cosine_weight_goes_from_momentum_to_end_momentum():
    # MMSelfSup's decays for K=10, which are one minus the weights of the new value
    decays = [0.996, 0.996098, 0.996382, 0.996824, 0.997382, 0.998, 0.998618, 0.999176, 0.999618, 0.999902, 1.0]
    average = CosineEMA(momentum=0.004, end_momentum=0.0, total_steps=10)
    weights = jax.vmap(average.weight)(jnp.arange(12, dtype=jnp.int32))
    np.testing.assert_allclose(weights[:11], 1 - np.array(decays), atol=5.1e-7)
    assert weights[11] == weights[10] == 0.0
    # 1 + 0.002 * (2 - 1): halfway through a run of two updates
    np.testing.assert_allclose(run_updates(CosineEMA(total_steps=2), [1, 2]), [1, 1.002], rtol=1e-6)


def test_the_cosine_uses_the_length_of_the_run_unless_total_steps_is_set():
    assert CosineEMA().with_total_steps(50) == CosineEMA(total_steps=50)
    assert CosineEMA(total_steps=7).with_total_steps(50) == CosineEMA(total_steps=7)
    assert ExponentialMovingAverage().with_total_steps(50) == ExponentialMovingAverage()


def test_narrow_floats_are_averaged_in_float32_and_non_floats_are_copied():
    params = {"w": jnp.bfloat16(1.0), "n": jnp.int32(3), "on": jnp.bool_(True), "key": jax.random.key(0)}
    average = ExponentialMovingAverage(momentum=1e-3)
    state = average.init(params)
    assert state.params["w"].dtype == jnp.float32
    for w, n in ((1.0, 4), (2.0, 5)):
        state = jax.jit(average.update)(state, {**params, "w": jnp.bfloat16(w), "n": jnp.int32(n)})
    np.testing.assert_allclose(state.params["w"], 1.001, rtol=1e-6)  # bfloat16 would round it to 1
    assert state.params["n"] == 5
    assert state.params["n"].dtype == jnp.int32
    assert state.params["on"]
    assert state.params["key"] == params["key"]


def test_the_average_never_shares_a_buffer_with_the_parameters():
    average = ExponentialMovingAverage()

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, state):
        params = jax.tree.map(lambda p: p + 1, params)
        return params, average.update(state, params)

    params = {"w": jnp.zeros(4), "n": jnp.zeros(4, jnp.int32)}
    state = average.init(params)
    for _ in range(3):  # JAX rejects a shared buffer as donated twice
        params, state = step(params, state)
    np.testing.assert_array_equal(state.params["n"], params["n"])


def test_updates_between_intervals_do_not_change_the_average():
    average = ExponentialMovingAverage(momentum=0.1, interval=2)
    assert run_updates(average, [1.0, float("inf"), 2.0])[:2] == [1.0, 1.0]


def test_averages_run_under_scan_vmap_and_shard_map():
    average, values = MomentumAnnealingEMA(momentum=0.3, gamma=1), jnp.arange(1, 7, dtype=jnp.float32)
    expected = [1, 1.5, 2, 2.6, 3.32, 4.124]

    def run(values):
        def body(state, value):
            state = average.update(state, value)
            return state, state.params

        return jax.lax.scan(body, average.init(values[0]), values)[1]

    np.testing.assert_allclose(jax.jit(run)(values), expected, rtol=1e-6)
    batch = jnp.stack([values, 2 * values])
    np.testing.assert_allclose(jax.vmap(run)(batch), [expected, 2 * np.array(expected)], rtol=1e-6)
    mesh, spec = Mesh(np.array(jax.devices()[:2]), ("data",)), PartitionSpec("data")
    sharded = jax.shard_map(jax.vmap(run), mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_allclose(jax.jit(sharded)(batch), [expected, 2 * np.array(expected)], rtol=1e-6)


def test_a_momentum_that_looks_like_a_decay_warns():
    with pytest.warns(UserWarning, match=r"for a decay of 0.999 set momentum=0.001"):
        average = ExponentialMovingAverage(momentum=0.999)
    assert run_updates(average, [1, 2]) == pytest.approx([1, 1.999])


def test_a_custom_average_only_defines_its_weight():
    class Half(Average):
        interval = 1

        def weight(self, steps):
            return jnp.float32(0.5)

    assert run_updates(Half(), [2, 4, 8]) == [2, 3, 5.5]
