"""Training of the parameters that `NnxModel(wrt=...)` selects, beside frozen ones."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jengine import load_model
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.data import ArrayDataset
from jengine.extras.weights import export_params
from jengine.model import CastModel, CrossEntropy, NnxModel, Precision
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

_rng = np.random.default_rng(0)
DATA = {"image": _rng.normal(size=(32, 6)).astype(np.float32), "label": np.arange(32, dtype=np.int32) % 3}
BASE = ["attn.query.bias", "attn.query.kernel", "mlp.bias", "mlp.kernel"]
LORA = ["adapter.lora_a", "adapter.lora_b", "head.lora.lora_a", "head.lora.lora_b"]


class Net(nnx.Module):
    """A small attention and two adapters of nnx: beside a layer, and in one."""

    def __init__(self, rngs):
        self.attn = nnx.Module()
        self.attn.query = nnx.Linear(6, 6, rngs=rngs)
        self.mlp = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.9, use_bias=False, use_scale=False, rngs=rngs)
        self.head = nnx.LoRALinear(6, 3, lora_rank=2, use_bias=False, rngs=rngs)
        self.adapter = nnx.LoRA(6, 2, 6, rngs=rngs)

    def __call__(self, x):
        query = self.attn.query(x)
        x = self.norm(jax.nn.softmax(query @ query.T / 2.0) @ x + self.adapter(x))
        return self.head(nnx.relu(self.mlp(x)))


def make_runner(work_dir, model=None, epochs=2, **changes):
    arguments = dict(
        train_dataloader=dict(batch_size=8, sampler=dict(type="DefaultSampler", shuffle=False), dataset=ArrayDataset(DATA)),
        train_cfg=dict(max_epochs=epochs), optim_wrapper=optax.adam(1e-2), randomness=dict(seed=0), default_hooks={},
    )  # fmt: skip
    model = model or NnxModel(Net(nnx.Rngs(0)), CrossEntropy(), wrt=nnx.LoRAParam)
    return build_runner(work_dir, model, **{**arguments, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runner = make_runner(tmp_path_factory.mktemp("wrt") / "run", custom_hooks=[dict(type="EMAHook", momentum=0.1)])
    runner.train()
    return runner


def test_a_run_equals_the_loop_by_hand_with_the_same_wrt(run):
    model = Net(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.adam(1e-2), wrt=nnx.LoRAParam)

    @nnx.jit
    def train_step(model, optimizer, batch):
        def loss_fn(model):
            return CrossEntropy()(model(batch["image"]), batch)["loss"].mean()

        grads = nnx.grad(loss_fn, argnums=nnx.DiffState(0, nnx.LoRAParam))(model)
        optimizer.update(model, grads)

    for i in range(8):
        rows = slice(8 * (i % 4), 8 * (i % 4) + 8)
        train_step(model, optimizer, {name: x[rows] for name, x in DATA.items()})
    expected = flatten(nnx.to_pure_dict(nnx.state(model)))
    params, state = flatten(run.state.params), run.state.model_state
    assert list(params) == LORA
    assert list(flatten(state["frozen"])) == [*BASE[:2], "head.kernel", *BASE[2:]]
    for path, leaf in {**params, **flatten(state["frozen"]), **flatten(state["state"])}.items():
        np.testing.assert_allclose(leaf, expected[path], rtol=1e-6, atol=1e-6, err_msg=path)


def test_only_what_is_trained_has_an_optimizer_state_and_an_average(run):
    for tree in (optax.tree.get(run.state.opt_state, "mu"), run.state.hook_state["EMAHook"].params):
        assert list(flatten(tree)) == LORA
    assert float(abs(run.state.params["adapter"]["lora_b"]).max()) > 0


def assert_equal_states(run, other):
    for item in ("params", "model_state", "opt_state"):
        jax.tree.map(np.testing.assert_array_equal, getattr(run.state, item), getattr(other.state, item))


def test_a_resumed_run_ends_bit_identical(run, tmp_path):
    hooks = [dict(type="EMAHook", momentum=0.1)]
    make_runner(tmp_path, epochs=1, custom_hooks=hooks).train()
    resumed = make_runner(tmp_path, custom_hooks=hooks, resume=True)
    resumed.train()
    assert_equal_states(run, resumed)


def test_chunks_and_a_config_with_import_paths_train_the_same(run, tmp_path):
    model = dict(
        type="NnxModel", module=lambda rngs: Net(nnx.Rngs(0)), loss=dict(type="CrossEntropy"),
        wrt=[dict(type="flax.nnx.PathContains", key="adapter"), "flax.nnx.LoRAParam"],
    )  # fmt: skip
    chunked = make_runner(tmp_path, model, train_cfg=dict(max_epochs=2, steps_per_call=4))
    chunked.train()
    jax.tree.map(
        lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6, atol=1e-7), chunked.state.params, run.state.params
    )


def test_replicas_share_the_frozen_parameters_and_evaluate_as_the_loaded_model(tmp_path):
    parallel = dict(type="DataParallel", devices=2)
    evaluation = dict(val_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)), val_cfg=dict(), val_evaluator=
        dict(type="Accuracy"))  # fmt: skip
    model = NnxModel(Net, CrossEntropy(), wrt=nnx.LoRAParam)
    runner = make_runner(
        tmp_path, model, 1, parallel=parallel, custom_hooks=[dict(type="SyncBuffersHook")], **evaluation
    )
    runner.train()
    state = runner.state.model_state
    assert state["frozen"]["mlp"]["kernel"].shape == (6, 6)
    assert state["state"]["norm"]["mean"].shape == (2, 6)
    module = runner.module()
    np.testing.assert_allclose(
        load_model(str(tmp_path), model=model)(DATA), module(DATA["image"]), rtol=1e-5, atol=1e-6
    )


def test_the_rules_shard_frozen_and_trained_parameters(tmp_path):
    rules = [("mlp.kernel", (None, "tensor")), ("adapter.lora_a", ("tensor",))]
    parallel = dict(type="Pjit", mesh=dict(data=2, tensor=2), devices=4, rules=rules, strict=True)
    state = make_runner(tmp_path, epochs=1, parallel=parallel).train()
    kernel, lora_a = state.model_state["frozen"]["mlp"]["kernel"], state.params["adapter"]["lora_a"]
    assert kernel.sharding.shard_shape(kernel.shape) == (6, 3)
    assert lora_a.sharding.shard_shape(lora_a.shape) == (3, 2)


class Plain(nnx.Module):
    """The network before it was adapted."""

    def __init__(self, rngs):
        self.mlp = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(6, rngs=rngs)

    def __call__(self, x):
        return self.mlp(self.norm(x))


class Adapted(Plain):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.mlp = nnx.LoRA(6, 2, 3, base_module=self.mlp, rngs=rngs)


def test_a_run_loads_the_weights_of_the_network_without_adapters_and_its_own(tmp_path):
    plain = make_runner(tmp_path / "plain", NnxModel(Plain, CrossEntropy()))
    plain.train()
    source = dict(path=str(tmp_path / "plain"), rename=[("mlp", "mlp.base_module")])
    adapted = make_runner(tmp_path / "adapted", NnxModel(Adapted, CrossEntropy(), wrt=nnx.LoRAParam), load_from=source)
    state = adapted.train()
    frozen = flatten(state.model_state["frozen"])
    assert list(frozen) == ["mlp.base_module.bias", "mlp.base_module.kernel", "norm.bias", "norm.scale"]
    np.testing.assert_array_equal(frozen["mlp.base_module.kernel"], plain.state.params["mlp"]["kernel"])
    assert float(abs(state.params["mlp"]["lora_b"]).max()) > 0
    own = make_runner(
        tmp_path / "own", NnxModel(Adapted, CrossEntropy(), wrt=nnx.LoRAParam), load_from=str(tmp_path / "adapted"),
        val_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)), val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
    )  # fmt: skip
    own.val()
    jax.tree.map(np.testing.assert_array_equal, own.state.params, state.params)
    jax.tree.map(np.testing.assert_array_equal, own.state.model_state, state.model_state)
    tensors = export_params(tmp_path / "adapted", tmp_path / "adapted.safetensors")
    assert {"mlp.base_module.weight", "mlp.lora_a", "norm.weight"} < tensors.keys()


def test_groups_and_decay_rules_see_what_is_trained(tmp_path):
    model = NnxModel(Net(nnx.Rngs(0)), CrossEntropy(), wrt=nnx.Any(nnx.LoRAParam, nnx.PathContains("mlp")))
    wrapper = dict(
        optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.1),
        paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys={"lora": dict(lr_mult=2.0)}),
    )
    settings = make_runner(tmp_path, model, optim_wrapper=wrapper).build_optimizer().param_settings
    assert list(settings) == sorted([*LORA, "mlp.bias", "mlp.kernel"])
    assert settings["adapter.lora_a"]["lr"] == 2e-2
    assert settings["mlp.bias"]["weight_decay"] == 0.0


def test_frozen_parameters_compute_in_low_precision_and_are_kept_in_the_dtype_of_parameters():
    model = NnxModel(Net(nnx.Rngs(0)), CrossEntropy(), wrt=nnx.LoRAParam)
    cast = CastModel(model, Precision(compute="bfloat16", params="bfloat16"))
    params, state = cast.init(jax.random.key(0), DATA)
    assert {leaf.dtype for leaf in jax.tree.leaves((params, state["frozen"]))} == {jnp.dtype("bfloat16")}
    losses, new_state = cast.loss(params, state, DATA, rng=jax.random.key(0), hyperparams={})
    assert losses["loss"].dtype == jnp.float32
    jaxpr = str(jax.make_jaxpr(lambda *args: cast.predict(*args))(params, state, DATA))
    assert "f32[32,6] = dot_general" not in jaxpr
    assert new_state["state"]["norm"]["mean"].dtype == jnp.float32


def test_a_model_with_adapters_and_no_wrt_says_once_what_is_trained(caplog):
    caplog.set_level(logging.INFO, "jengine")
    for wrt, trained in ((None, 9), (nnx.LoRAParam, 4)):
        model = NnxModel(Net(nnx.Rngs(0)), CrossEntropy(), wrt=wrt)
        for _ in range(2):
            params, _ = jax.eval_shape(model.init, jax.random.key(0), DATA)
        assert len(jax.tree.leaves(params)) == trained
    (message,) = [record.getMessage() for record in caplog.records if "wrt" in record.getMessage()]
    assert [word for word in ("4 LoRAParam, 5 Param", "wrt=nnx.LoRAParam") if word not in message] == []


class Quantized(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Param(jnp.arange(6, dtype=jnp.int8))
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        return self.head(x * self.table.astype(x.dtype))


@pytest.mark.parametrize(
    ("wrt", "words"),
    [
        (nnx.LoRAParam, ["`wrt`", "got", "LoRAParam"]),
        (nnx.Param, ["`wrt`", "got table of the dtype int8"]),
    ],
)
def test_a_filter_that_cannot_be_trained_is_an_error(wrt, words):
    check_refusal(lambda: NnxModel(Quantized, CrossEntropy(), wrt=wrt).init(jax.random.key(0), DATA), ConfigError, *words)


def test_integers_are_kept_beside_what_is_trained(tmp_path):
    state = make_runner(tmp_path, NnxModel(Quantized, CrossEntropy(), wrt=nnx.PathContains("head")), 1).train()
    assert list(flatten(state.params)) == ["head.bias", "head.kernel"]
    np.testing.assert_array_equal(state.model_state["frozen"]["table"], np.arange(6, dtype=np.int8))
