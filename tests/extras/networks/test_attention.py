"""Test that every implementation of attention computes what `jax.nn.dot_product_attention` does, gradients included."""

import contextlib
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from jengine.extras.networks.attention import attend, choose_implementation

LENGTH = 384  # two blocks of queries, and three tiles of the kernel for TPUs
SEGMENTS = np.repeat([[0, 1, 2], [0, 0, 1]], 128, axis=1)
CASES = {
    "causal": dict(),
    "window": dict(window=100, scale=0.4),
    "segments and window": dict(segment_ids=SEGMENTS, window=50),
    "both directions": dict(causal=False, segment_ids=SEGMENTS),
}


@pytest.fixture(scope="module")
def arrays():
    rng = np.random.RandomState(0)
    return tuple(rng.randn(2, LENGTH, heads, 16).astype(np.float32) for heads in (4, 2, 2))


def by_formula(query, key, value, causal=True, segment_ids=None, window=None, scale=0.25, cap=None):
    """Return softmax(q k / sqrt(K)) v, with K = 16, in float64."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    key, value = (np.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    scores = np.einsum("bqhk,bshk->bhqs", query, key) * scale
    scores = scores if cap is None else cap * np.tanh(scores / cap)
    distance = np.arange(LENGTH)[:, None] - np.arange(LENGTH)
    allowed = np.ones((1, LENGTH, LENGTH), bool)
    if causal:
        allowed = allowed & (distance >= 0) & (distance < (window or LENGTH))
    if segment_ids is not None:
        allowed = allowed & (segment_ids[:, :, None] == segment_ids[:, None, :])
    scores = np.where(allowed[:, None], scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return np.einsum("bhqs,bshk->bqhk", weights / weights.sum(-1, keepdims=True), value)


@pytest.mark.parametrize("case", CASES)
def test_implementations_equal_the_formula_and_each_others_gradients(arrays, case):
    # Heads and tokens are divided, so splash attention has tiles of 128 queries of two parts of the tokens.
    mesh = jax.make_mesh((3, 2), ("context", "tensor"), axis_types=(AxisType.Auto,) * 2)

    def compute(implementation, mesh=mesh):
        def total(query, key, value):
            y = attend(query, key, value, implementation=implementation, **CASES[case])
            return jnp.sin(y).sum(), y

        step = jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))
        if mesh is None:
            (_, y), gradients = step(*arrays)
        else:
            with jax.set_mesh(mesh):
                sharding = jax.NamedSharding(mesh, PartitionSpec(None, "context", "tensor"))
                (_, y), gradients = step(*jax.device_put(arrays, sharding))
            assert y.sharding.is_equivalent_to(sharding, y.ndim)
        return y, gradients

    (plain, expected), *others = (compute(name, mesh=None) for name in ("plain", "blocks", "splash"))
    if "segment_ids" in CASES[case]:  # the most that is divided
        others += map(compute, ["blocks", "splash"])
    np.testing.assert_allclose(plain, by_formula(*arrays, **CASES[case]), atol=2e-6)
    for y, gradients in others:
        np.testing.assert_allclose(y, plain, atol=3e-6)
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=3e-5), gradients, expected)


def test_capped_scores_equal_the_formula_and_each_others_gradients(arrays):
    mesh = jax.make_mesh((3,), ("context",), axis_types=(AxisType.Auto,))
    options = dict(window=200, cap=0.7, segment_ids=SEGMENTS)
    results = []
    for implementation, is_divided in (("blocks", False), ("blocks", True), ("splash", False)):

        def total(query, key, value, implementation=implementation):
            y = attend(query, key, value, implementation=implementation, **options)
            return jnp.sin(y).sum(), y

        with jax.set_mesh(mesh) if is_divided else contextlib.nullcontext():
            results.append(jax.jit(jax.value_and_grad(total, (0, 1, 2), has_aux=True))(*arrays))
    for (_, y), gradients in results:
        np.testing.assert_allclose(y, by_formula(*arrays, **options), atol=3e-6)
        jax.tree.map(lambda got, want: np.testing.assert_allclose(got, want, atol=3e-5), gradients, results[0][1])
    short = [x[:, :5] for x in arrays]
    capped = attend(*short, cap=1e-4)  # all scores are nearly equal: a mean over the earlier values
    mean = np.cumsum(short[2], axis=1) / np.arange(1, 6)[:, None, None]
    np.testing.assert_allclose(capped[:, :, ::2], mean, atol=1e-3)
    for wrong in (dict(causal=False), dict(implementation="plain"), dict(implementation="cudnn")):
        with pytest.raises(ValueError, match="attend: `cap` must be None without `causal`, with 'cudnn' and 'plain'"):
            attend(*short, cap=2.0, **wrong)


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_of_tokamax_equal_the_formula(arrays, case):
    pytest.importorskip("tokamax")  # it requires Python 3.12
    mesh = jax.make_mesh((2, 2), ("data", "tensor"), axis_types=(AxisType.Auto,) * 2)
    step = jax.jit(functools.partial(attend, implementation="tokamax", **CASES[case]))
    expected = by_formula(*arrays, **CASES[case])
    np.testing.assert_allclose(step(*arrays), expected, atol=3e-6)
    with jax.set_mesh(mesh):
        np.testing.assert_allclose(step(*arrays), expected, atol=3e-6)
    context = jax.make_mesh((2,), ("context",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(context), pytest.raises(ValueError, match="must not be 'tokamax' with the axis `context`"):
        step(*arrays)


def test_half_precision_differs_by_its_rounding(arrays):
    half = tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)
    expected = by_formula(*(np.asarray(x, np.float32) for x in half))
    for implementation in ("blocks", "splash"):
        y = jax.jit(functools.partial(attend, implementation=implementation))(*half)
        assert y.dtype == jnp.bfloat16
        np.testing.assert_allclose(np.asarray(y, np.float32), expected, atol=0.02)


def test_the_kernel_for_tpus_is_divided_over_examples_and_heads(arrays):
    mesh = jax.make_mesh((2, 1, 2), ("data", "fsdp", "tensor"), axis_types=(AxisType.Auto,) * 3)
    sharding = jax.NamedSharding(mesh, PartitionSpec("data", None, "tensor"))
    with jax.set_mesh(mesh):
        y = jax.jit(lambda *qkv: attend(*qkv, implementation="splash"))(*jax.device_put(arrays, sharding))
    assert y.sharding.is_equivalent_to(sharding, y.ndim)
    np.testing.assert_allclose(y, by_formula(*arrays), atol=3e-6)


def _mesh_of(kind, platform):
    device = jax.sharding.AbstractDevice(device_kind=kind, num_cores=1, platform=platform)
    return jax.sharding.AbstractMesh((1,), ("data",), abstract_device=device)


@pytest.mark.parametrize(
    ("platform", "length", "dtype", "implementation"),
    [
        ("tpu", 256, "bfloat16", "splash"),
        ("tpu", 200, "bfloat16", "blocks"),
        ("gpu", 200, "bfloat16", "cudnn"),
        ("gpu", 256, "float32", "blocks"),
        ("cpu", 256, "bfloat16", "blocks"),
    ],
)
def test_the_devices_of_the_mesh_choose_the_implementation(platform, length, dtype, implementation):
    query = jax.ShapeDtypeStruct((2, length, 4, 64), dtype)
    with jax.sharding.use_abstract_mesh(_mesh_of("chip", platform)):
        assert choose_implementation(query) == implementation


@pytest.mark.skipif(jax.default_backend() == "gpu", reason="cuDNN is there")
def test_without_cudnn_a_gpu_gets_blocks_and_the_reason_once(arrays, caplog):
    half = tuple(jnp.asarray(x, jnp.bfloat16) for x in arrays)
    with jax.sharding.use_abstract_mesh(_mesh_of("NVIDIA H100", "gpu")), caplog.at_level("WARNING", "jengine"):
        jax.eval_shape(attend, *half)  # this machine has no cuDNN
        assert jax.eval_shape(attend, *half).shape == half[0].shape
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("attention is computed in blocks, slower than by cuDNN: ")


def test_blocks_skip_later_keys_on_a_mesh_whose_context_is_whole():
    def count_flops(*shape):
        with jax.set_mesh(
            jax.make_mesh(shape, ("data", "context")[: len(shape)], axis_types=(AxisType.Auto,) * len(shape))
        ):
            attend_blocks = jax.jit(lambda x: attend(x, x, x, implementation="blocks"))
            return attend_blocks.lower(jax.ShapeDtypeStruct((1, 1024, 2, 8), jnp.float32)).cost_analysis()["flops"]

    assert count_flops(1, 1) == count_flops(1)
