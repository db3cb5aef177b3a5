"""Matrix products in 8 and 4 bits, by qwix, against those of float32, and the page about them."""

import pathlib
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from jengine.data import ArrayDataset
from jengine.extras.networks import quantize, quantized
from jengine.hooks import Hook
from jengine.model import LinenModel, parameter_roles
from tests.runner.conftest import build_runner

pytestmark = pytest.mark.foreign

_numbers = (np.random.RandomState(0).randint(0, 32, (64, 1)) + np.arange(17)) % 32  # each is the next one
DATA = {"tokens": _numbers[:, :-1].astype(np.int32), "targets": _numbers[:, 1:].astype(np.int32)}
TRANSFORMER = dict(type="TransformerLM", vocab_size=32, width=32, depth=2, heads=2, mlp_width=64)


class Losses(Hook):
    def __init__(self):
        self.losses = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.losses.append(float(outputs["loss"]))


def train(module, tmp_path, **changes):
    hook = Losses()
    runner = build_runner(
        tmp_path,
        dict(type="LinenModel", module=module, loss=dict(type="CrossEntropy", label="targets"), inputs="tokens"),
        train_dataloader=dict(batch_size=16, dataset=ArrayDataset(DATA)),
        train_cfg=dict(by_epoch=False, max_iters=40),
        optim_wrapper=dict(optimizer=dict(type="Adam", lr=5e-3)),
        custom_hooks=[hook],
        **changes,
    )
    runner.train()
    return runner, hook.losses


@pytest.fixture(scope="module")
def exact(tmp_path_factory):
    return train(TRANSFORMER, tmp_path_factory.mktemp("exact"))[1]


@pytest.mark.parametrize(
    ("settings", "changes"),
    [
        (dict(dtype="int8"), dict(precision="bfloat16")),
        (dict(dtype="int8", gradients="int8"), dict(parallel=dict(type="Pjit", mesh=dict(fsdp=2), devices=2))),
        (dict(dtype="float8_e4m3fn"), {}),
    ],
    ids=["int8 and bfloat16", "gradients and a mesh", "float8"],
)
def test_losses_in_8_bits_fall_like_those_in_float32(exact, settings, changes, tmp_path):
    pytest.importorskip("qwix")
    _, losses = train(dict(type="Quantized", module=TRANSFORMER, **settings), tmp_path, **changes)
    assert exact[-1] < 0.1 < 3 < exact[0]
    np.testing.assert_allclose(losses[:20], exact[:20], rtol=0.08)  # 3.9 to 0.2
    assert losses[-1] < 0.1


@pytest.mark.parametrize(
    ("dtype", "error", "changes"),
    [
        ("mxfp8", 0.1, {}),
        ("nvfp4", 0.3, {}),
        ("int4", 0.3, {}),
        ("mxfp8", 0.1, dict(precision="bfloat16")),
        ("nvfp4", 0.3, dict(precision="bfloat16")),
    ],
    ids=["mxfp8", "nvfp4", "int4", "mxfp8 and bfloat16", "nvfp4 and bfloat16"],
)
def test_losses_with_tiles_fall_like_those_in_float32(exact, dtype, error, changes, tmp_path):
    pytest.importorskip("qwix")
    network = dict(type="Quantized", module=TRANSFORMER, dtype=dtype)  # of 16 numbers in each head
    _, losses = train(network, tmp_path, **changes)
    np.testing.assert_allclose(np.sum(losses[:20]), np.sum(exact[:20]), rtol=error)
    assert losses[0] != exact[0]
    assert losses[-1] < 0.2


class Merge(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.DenseGeneral(7, axis=(-2, -1), use_bias=False)(x)


def test_tiles_are_along_the_inputs_that_the_role_has():
    pytest.importorskip("qwix")
    batch = dict(x=np.random.RandomState(0).normal(size=(5, 3, 12)).astype("f") * np.arange(1, 4)[:, None])
    model = LinenModel(Merge(), loss=lambda outputs, batch: jnp.mean(outputs**2), inputs="x")
    params, _ = model.init(jax.random.key(0), batch)
    kernel = params["DenseGeneral_0"]["kernel"]
    fan_in = parameter_roles(model, params, batch=batch)["DenseGeneral_0.kernel"].fan_in
    assert fan_in == (0, 1)

    def round_tiles(x, summed):
        rows = np.moveaxis(np.asarray(x), summed, range(-len(summed), 0)).reshape(-1, 36)
        tiles = np.pad(rows, ((0, 0), (0, 28))).reshape(-1, 2, 32)
        scales = 2.0 ** np.ceil(np.log2(np.abs(tiles).max(-1, keepdims=True) / 448))
        return ((tiles / scales).astype(jnp.float8_e4m3fn).astype("f") * scales).reshape(-1, 64)[:, :36]

    expected = round_tiles(batch["x"], (1, 2)) @ round_tiles(kernel, fan_in).T
    actual = quantize(Merge(), "mxfp8").apply({"params": params}, batch["x"])
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    assert np.abs(actual - Merge().apply({"params": params}, batch["x"])).max() > 1e-3


def test_only_products_in_the_paths_have_8_bits(tmp_path):
    pytest.importorskip("qwix")
    module = dict(type="Quantized", module=TRANSFORMER, paths="layers/.*")
    runner, _ = train(module, tmp_path)

    def logits(params):
        return runner.model.predict(params, {}, DATA)

    program = str(jax.make_jaxpr(logits)(runner.state.params))
    products = re.findall(r"(\w+)\[[\d,]*\] = dot_general", program)
    assert products.count("i32") == 9  # of the scanned block: attention has six, the MLP three
    assert len(products) == 10  # and the head
    assert {leaf.dtype for leaf in jax.tree.leaves(runner.state.params)} == {np.dtype(np.float32)}


def test_the_page_about_models_runs_with_qwix():
    pytest.importorskip("qwix")
    page = (pathlib.Path(__file__).parents[3] / "docs" / "model.md").read_text()
    section = page[page.index("## Matrix products in 8 bits") :]
    names = {"__name__": "docs.model"}
    for block in re.findall(r"```python\n(.*?)```", section, flags=re.DOTALL):
        exec(compile(block, "model.md", "exec"), names)
    params, _ = names["model"].init(jax.random.key(0), {"image": np.ones((2, 8), np.float32)})
    assert params["kernel"].dtype == np.float32
    params, _ = names["quantized_model"].init(jax.random.key(0), {name: x[:2] for name, x in DATA.items()})
    assert params["layers"]["mlp"]["up"]["kernel"].shape == (2, 32, 64)


def test_gradients_keep_their_dtype_where_qwix_multiplies_in_float32(monkeypatch):
    # as on Blackwell GPUs
    qwix = pytest.importorskip("qwix")
    multiply = qwix.QtProvider.dot_general
    products = []

    def multiply_in_float32(*args, **options):
        products.append(multiply(*args, **options).astype("float32"))
        return products[-1]

    monkeypatch.setattr(qwix.QtProvider, "dot_general", multiply_in_float32)
    monkeypatch.setattr(quantized, "_is_multiplied", lambda dtype: True)
    dense = nn.Dense(32, dtype=jnp.bfloat16)
    x = jax.random.normal(jax.random.key(1), (4, 32), jnp.bfloat16)
    params = dense.init(jax.random.key(0), x)

    def loss(module, x):
        return jnp.sum(module.apply(params, x).astype(jnp.float32) * jnp.arange(128).reshape(4, 32))

    rounded = quantize(dense, "mxfp8")
    values = rounded.apply(params, x)
    assert values.dtype == jnp.bfloat16
    np.testing.assert_array_equal(values, products[-1].astype(jnp.bfloat16))
    grad = jax.grad(loss, 1)(rounded, x)
    assert grad.dtype == jnp.bfloat16
    np.testing.assert_array_equal(grad, jax.grad(loss, 1)(dense, x))  # of the exact product
    assert products


@pytest.mark.parametrize(
    ("backend", "capability", "expected"), [("gpu", "9.0", False), ("gpu", "10.0", True), ("gpu", "gfx942", False), ("cpu", None, False)]
)
def test_only_blackwell_gpus_multiply_small_formats(backend, capability, expected, monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability=capability)])
    assert quantized._is_multiplied("nvfp4") == quantized._is_multiplied("mxfp8") == expected
    assert not quantized._is_multiplied("int4")
