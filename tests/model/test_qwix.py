"""LoRA and QLoRA by qwix, as on the page about fine-tuning, against a loop by hand."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jengine.config.paths import flatten
from jengine.data import ArrayDataset
from jengine.model import CrossEntropy, NnxModel
from tests.runner.conftest import build_runner

pytestmark = pytest.mark.foreign

_rng = np.random.default_rng(0)
DATA = {"image": _rng.normal(size=(32, 6)).astype(np.float32), "label": np.arange(32, dtype=np.int32) % 3}


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.fc1 = nnx.Linear(6, 16, rngs=rngs)
        self.fc2 = nnx.Linear(16, 3, rngs=rngs)

    def __call__(self, x):
        return self.fc2(nnx.relu(self.fc1(x)))


def adapt(**rule):
    qwix = pytest.importorskip("qwix")
    provider = qwix.LoraProvider(module_path=".*", rank=2, alpha=4.0, **rule)
    return qwix.apply_lora_to_model(Mlp(nnx.Rngs(0)), provider, jnp.zeros((1, 6)), rngs=nnx.Rngs(1))


def train_by_hand(model, steps):
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return CrossEntropy()(model(batch["image"]), batch)["loss"].mean()

        optimizer.update(model, nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model))

    for i in range(steps):
        rows = slice(8 * (i % 4), 8 * (i % 4) + 8)
        train_step(model, optimizer, {name: x[rows] for name, x in DATA.items()})
    return model


@pytest.mark.parametrize(
    ("rule", "dtype"),
    [({}, "float32"), (dict(weight_qtype="nf4"), "int4"), (dict(weight_qtype="int4", tile_size=2), "int4")],
    ids=["LoRA", "QLoRA in NF4", "QLoRA in int4"],
)
def test_adapters_of_qwix_train_as_by_hand_and_resume(rule, dtype, tmp_path):
    def train(name, epochs, **changes):
        runner = build_runner(
            tmp_path / name,
            NnxModel(adapt(**rule), CrossEntropy(), wrt=nnx.LoRAParam),
            train_dataloader=dict(
                batch_size=8, dataset=ArrayDataset(DATA), sampler=dict(type="DefaultSampler", shuffle=False)
            ),
            train_cfg=dict(max_epochs=epochs),
            optim_wrapper=optax.adam(1e-2),
            default_hooks={},
            **changes,
        )
        runner.train()
        return runner

    whole = train("whole", 2)
    params, frozen = flatten(whole.state.params), flatten(whole.state.model_state["frozen"])
    assert list(params) == [f"{layer}.kernel_lora_{kind}" for layer in ("fc1", "fc2") for kind in "ab"]
    assert list(flatten(optax.tree.get(whole.state.opt_state, "mu"))) == list(params)
    assert frozen["fc1.kernel.array.qvalue" if rule else "fc1.kernel"].dtype == dtype  # NF4's uint4 codes as int4

    trained = train_by_hand(adapt(**rule), 8)
    for path, leaf in params.items():
        layer, name = path.split(".")
        np.testing.assert_allclose(leaf, getattr(getattr(trained, layer), name)[...], rtol=1e-6, atol=1e-6)
    outputs = whole.module()(DATA["image"])
    np.testing.assert_allclose(outputs, jax.jit(trained)(DATA["image"]), rtol=1e-5, atol=1e-5)

    train("parts", 1)
    parts = train("parts", 2, resume=True)
    jax.tree.map(np.testing.assert_array_equal, parts.state.params, whole.state.params)
    jax.tree.map(np.testing.assert_array_equal, parts.state.model_state, whole.state.model_state)


def test_the_page_about_fine_tuning_runs_with_qwix(run_page):
    pytest.importorskip("qwix")
    names = run_page("finetuning.md", only=lambda block: "nnx" in block or "def make_runner" in block)
    assert type(names["runner"].module().fc1.kernel).__name__ == "WithAux"
