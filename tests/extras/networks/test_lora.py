import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from safetensors.numpy import load_file

from jengine.cli import main
from jengine.config import MODELS, paths
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.extras.networks import LoRA
from jengine.extras.weights import export_params
from jengine.model import FunctionalModel, NnxModel
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

VIT = dict(
    type="LinenModel",
    module=dict(type="SmallViT", num_classes=10, patch=4, width=16, depth=1, heads=2),
    loss=dict(type="CrossEntropy"),
)
BATCH = {
    "image": np.random.default_rng(0).normal(size=(8, 8, 8, 1)).astype(np.float32),
    "label": np.arange(8, dtype=np.int32),
}
QUERY = "layers_0.attn.query.kernel"


@pytest.fixture(scope="module")
def vit():
    """Return the adapter of a vision transformer, with its initial variables."""
    model = MODELS.build(dict(type="LoRA", model=VIT, rank=4, alpha=8, targets=["attn", "fc1"], trainable=["head"]))
    return model, *jax.jit(model.init)(jax.random.key(0), BATCH)


def with_random_updates(params):
    """Return the parameters with random values for `lora_b`, as after some training."""
    return paths.map_with_path(
        lambda path, x: jax.random.normal(jax.random.key(len(path)), x.shape) if "lora_b" in path else x, params
    )


def test_only_the_updates_and_the_trainable_parameters_are_parameters(vit):
    _, params, model_state = vit
    shapes = {path: x.shape for path, x in paths.flatten(params).items()}
    assert {path: shape for path, shape in shapes.items() if path.startswith("layers_0.")} == {
        "layers_0.attn.query.kernel.lora_a": (16, 4), "layers_0.attn.query.kernel.lora_b": (4, 16),
        "layers_0.attn.key.kernel.lora_a": (16, 4), "layers_0.attn.key.kernel.lora_b": (4, 16),
        "layers_0.attn.value.kernel.lora_a": (16, 4), "layers_0.attn.value.kernel.lora_b": (4, 16),
        "layers_0.attn.out.kernel.lora_a": (16, 4), "layers_0.attn.out.kernel.lora_b": (4, 16),
        "layers_0.fc1.kernel.lora_a": (16, 4), "layers_0.fc1.kernel.lora_b": (4, 32),
    }  # fmt: skip
    assert {path for path in shapes if not path.startswith("layers_")} == {"head.kernel", "head.bias"}
    frozen = paths.flatten(model_state["frozen"])
    assert frozen[QUERY].shape == (16, 2, 8)
    assert "head.kernel" not in frozen


def test_an_untrained_adapter_predicts_exactly_what_its_model_predicts(vit):
    model, params, model_state = vit
    base = model.base_variables(params, model_state)
    plain = jax.jit(model.model.init)(jax.random.key(0), BATCH)
    jax.tree.map(lambda x, y: np.testing.assert_allclose(x, y, rtol=1e-6), base, plain)
    np.testing.assert_array_equal(
        jax.jit(model.predict)(params, model_state, BATCH), jax.jit(model.model.predict)(*base, BATCH)
    )


def test_the_merged_model_predicts_and_computes_losses_as_the_adapter(vit):
    model, params, model_state = vit
    params = with_random_updates(params)
    merged = model.merge_weights(params, model_state)
    np.testing.assert_allclose(
        jax.jit(model.predict)(params, model_state, BATCH), jax.jit(model.model.predict)(*merged, BATCH), rtol=1e-6
    )
    (a, b), kernel = params["layers_0"]["attn"]["query"]["kernel"].values(), model_state["frozen"]
    expected = kernel["layers_0"]["attn"]["query"]["kernel"] + 8 / 4 * (a @ b).reshape(16, 2, 8)
    np.testing.assert_allclose(paths.flatten(merged[0])[QUERY], expected, rtol=1e-5)
    arguments = dict(rng=jax.random.key(1), hyperparams={})
    losses, new_state = jax.jit(model.loss)(params, model_state, BATCH, **arguments)
    expected, _ = jax.jit(model.model.loss)(*merged, BATCH, **arguments)
    np.testing.assert_allclose(losses["loss"], expected["loss"], rtol=1e-5)
    assert jax.tree.structure(new_state) == jax.tree.structure(model_state)


def test_kernels_of_convolutions_and_stacked_layers_have_updates():
    params = {"conv": {"kernel": jnp.ones((3, 3, 4, 6))}, "blocks": {"fc": {"kernel": jnp.ones((5, 4, 6))}}}
    base = FunctionalModel(lambda: params, lambda params: jnp.zeros(()))
    model = LoRA(base, targets=[("conv", {}), ("blocks", dict(stacked=1, rank=3, alpha=6.0))], rank=2)
    trained, model_state = model.init(jax.random.key(0), {})
    assert {path: x.shape for path, x in paths.flatten(trained).items()} == {
        "conv.kernel.lora_a": (36, 2), "conv.kernel.lora_b": (2, 6),
        "blocks.fc.kernel.lora_a": (5, 4, 3), "blocks.fc.kernel.lora_b": (5, 3, 6),
    }  # fmt: skip
    assert float(model_state["scale"]["blocks"]["fc"]["kernel"]) == 2.0
    trained = with_random_updates(trained)
    pair = trained["blocks"]["fc"]["kernel"]
    merged, _ = model.merge_weights(trained, model_state)
    np.testing.assert_allclose(
        merged["blocks"]["fc"]["kernel"][3], 1 + 2 * pair["lora_a"][3] @ pair["lora_b"][3], rtol=1e-5
    )


LM = dict(vocab_size=64, width=32, depth=16, heads=2, mlp_width=64)
TEXT = {"tokens": np.zeros((1, 8), np.int32), "targets": np.zeros((1, 8), np.int32)}


def adapt(module, targets, model_type="LinenModel", batch=TEXT, inputs="tokens", **settings):
    """Return the shapes of the parameters and the model state of an adapter."""
    inner = dict(type=model_type, module=module, loss=dict(type="CrossEntropy", label="targets"), inputs=inputs)
    model = MODELS.build(dict(type="LoRA", model=inner, rank=4, targets=targets, **settings))
    params, model_state = jax.eval_shape(model.init, jax.random.key(0), batch)
    return {path: x.shape for path, x in paths.flatten(params).items()}, model_state


@pytest.mark.parametrize("name", ["TransformerLM", "NnxTransformerLM"])
def test_each_layer_of_a_scanned_transformer_has_its_own_update_and_norms_have_none(name):
    model_type = "NnxModel" if name.startswith("Nnx") else "LinenModel"
    shapes, _ = adapt(dict(type=name, **LM), ["attn"], model_type)
    assert shapes == {
        **{f"layers.attn.{x}.kernel.lora_a": (16, 32, 4) for x in ("query", "key", "value", "out")},
        **{f"layers.attn.{x}.kernel.lora_b": (16, 4, 32) for x in ("query", "key", "value", "out")},
    }
    everything, _ = adapt(dict(type=name, **LM), ["."], model_type)
    assert not {path for path in everything if "norm" in path}
    assert everything["embed.embedding.lora_a"] == (64, 4)
    assert shapes == adapt(dict(type=name, **LM), [("attn", dict(stacked=1))], model_type)[0]


def test_a_stacked_and_an_unrolled_transformer_have_the_same_updates():
    stacked, _ = adapt(dict(type="TransformerLM", **LM), ["attn", "mlp"])
    unrolled, _ = adapt(dict(type="TransformerLM", **LM, scan=False), ["attn", "mlp"])
    assert {
        path.replace("layers_0", "layers"): (16, *shape) for path, shape in unrolled.items() if "layers_0" in path
    } == stacked


def test_each_expert_has_its_own_update():
    shapes, _ = adapt(dict(type="TransformerLM", **{**LM, "depth": 3}, experts=2), [r"experts\.(gate|up|down)"])
    assert shapes["layers.experts.up.lora_a"] == (3, 2, 32, 4)
    assert shapes["layers.experts.down.lora_b"] == (3, 2, 4, 32)


class Heads(nn.Module):
    """Several projections at once, by `nn.vmap`, stacked along an axis."""

    axis: int = 0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(8, 6)(tokens)
        dense = nn.vmap(
            nn.Dense, variable_axes={"params": self.axis}, split_rngs={"params": True}, in_axes=None, axis_size=5
        )
        return dense(8, name="heads")(x).mean(axis=0)


def test_kernels_that_vmap_stacks_have_updates_of_their_own_or_are_refused():
    shapes, _ = adapt(Heads(), ["heads"])
    assert shapes == {"heads.kernel.lora_a": (5, 6, 4), "heads.kernel.lora_b": (5, 4, 8)}
    with pytest.raises(ConfigError, match=r"must be stacked along the first axes, got heads.kernel \(6, 5, 8\)"):
        adapt(Heads(axis=1), ["heads"])


def test_stacked_modules_of_nnx_have_updates_of_their_own():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(8, 6, rngs=rngs)
            stack = nnx.split_rngs(splits=3)
            self.blocks = stack(nnx.vmap(lambda rngs: nnx.Linear(6, 6, rngs=rngs)))(rngs)
            self.norms = stack(nnx.vmap(lambda rngs: nnx.LayerNorm(6, rngs=rngs)))(rngs)

        def __call__(self, tokens):
            return self.embed(tokens)

    shapes, _ = adapt(Net, ["."], "NnxModel")
    assert {path: shape for path, shape in shapes.items() if path.endswith("lora_a")} == {
        "embed.embedding.lora_a": (8, 4), "blocks.kernel.lora_a": (3, 6, 4)
    }  # fmt: skip


def test_parameters_may_be_any_pytree():
    base = FunctionalModel(lambda: [jnp.ones((4, 4)), (jnp.ones(4), jnp.ones((4, 2)))], lambda params: jnp.zeros(()))
    model = LoRA(base, targets=["^0$|^.0$"], rank=1)
    trained, model_state = model.init(jax.random.key(0), {})
    assert list(paths.flatten(trained)) == ["0.lora_a", "0.lora_b"]
    merged, _ = model.merge_weights(trained, model_state)
    assert jax.tree.structure(merged) == jax.tree.structure(base.init(jax.random.key(0), {})[0])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (dict(targets=["atn.query.kernel"]), ["`targets`", "got 'atn.query.kernel'", "attn.query"]),
        (dict(targets=["bias"]), ["`targets`"]),
        (dict(targets=["zzz"]), ["cls_token", "head.kernel"]),
        (dict(targets=["attn"], trainable=["heat"]), ["`trainable`", "got 'heat'", "closest: head"]),
        (dict(targets=["patch_embed"], rank=17), ["`rank`", "16", "patch_embed.kernel", "[16, 16]"]),
    ],
)  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_with_the_closest_paths(arguments, words):
    check_refusal(lambda: jax.eval_shape(LoRA(VIT, **arguments).init, jax.random.key(0), BATCH), ConfigError, *words)


@pytest.mark.parametrize(
    ("targets", "error", "words"),
    [
        (["(attn"], ConfigError, ["got '(attn'"]),
        ([], ConfigError, ["one rule"]),
        ([("attn", dict(rnk=4))], TypeError, ["'rnk'", "did you mean 'rank'"]),
        ([("attn", dict(rank=0))], ConfigError, ["rank`", "at least 1", "got 0"]),
    ],
)
def test_bad_rules_are_refused_by_the_constructor(targets, error, words):
    check_refusal(lambda: LoRA(VIT, targets), error, *words)


def test_an_nnx_model_is_adapted():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.fc1, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.fc2 = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.fc2(nnx.relu(self.norm(self.fc1(x))))

    batch = {"x": np.ones((4, 4), np.float32), "label": np.zeros(4, np.int32)}
    model = LoRA(NnxModel(Net, dict(type="CrossEntropy"), inputs="x"), targets=[r"fc\d\.weight"], rank=2)  # torch alias
    params, model_state = jax.jit(model.init)(jax.random.key(0), batch)
    assert list(params) == ["fc1", "fc2"]
    _, new_state = jax.jit(model.loss)(params, model_state, batch, rng=jax.random.key(0), hyperparams={})
    old, new = (paths.flatten(state["state"]) for state in (model_state, new_state))
    assert not np.allclose(old["norm.mean"], new["norm.mean"])
    params = with_random_updates(params)
    module = model.merge(params, model_state)  # the nnx.Module itself, with the updates added
    np.testing.assert_allclose(module(batch["x"]), model.predict(params, model_state, batch), rtol=1e-5)


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x, train=False):
        x = nn.Dense(8, name="fc1")(x.reshape(x.shape[0], -1))
        x = nn.relu(nn.BatchNorm(use_running_average=not train, name="bn")(x))
        return nn.Dense(10, name="head")(x)


MLP = dict(type="LinenModel", module=dict(type=Mlp), loss=dict(type="CrossEntropy"))
ADAPTED = dict(type="LoRA", model=MLP, rank=2, targets=["fc1"], trainable=["head"])
EMA = [dict(type="EMAHook", momentum=0.5)]


def make_runner(work_dir, model, **changes):
    arguments = dict(
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(BATCH)),
        train_cfg=dict(max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1)),
        val_dataloader=dict(batch_size=8, dataset=ArrayDataset(BATCH)),
        val_cfg=dict(), val_evaluator=dict(type="Accuracy"), randomness=dict(seed=0), default_hooks={},
    )  # fmt: skip
    return build_runner(work_dir, model, **{**arguments, **changes})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """Return a trained run of the model itself, and one of its adapter that started from its weights."""
    directory = tmp_path_factory.mktemp("lora")
    plain = make_runner(directory / "plain", MLP, train_cfg=dict(max_epochs=1))
    plain.train()
    adapted = make_runner(directory / "adapted", ADAPTED, load_from=str(directory / "plain"), custom_hooks=EMA)
    adapted.train()
    return plain, adapted


def test_a_run_loads_the_weights_of_the_model_itself_and_trains_only_the_updates(runs):
    before, state = paths.flatten(runs[0].state.params), runs[1].state
    frozen = paths.flatten(state.model_state["frozen"])
    assert list(frozen) == ["bn.bias", "bn.scale", "fc1.bias", "fc1.kernel"]
    for path, leaf in frozen.items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)
    for tree in (optax.tree.get(state.opt_state, "mu"), state.hook_state["EMAHook"].params):
        assert jax.tree.structure(tree) == jax.tree.structure(state.params)
    assert float(abs(state.params["fc1"]["kernel"]["lora_b"]).max()) > 0
    assert not np.allclose(state.params["head"]["kernel"], before["head.kernel"])
    statistics = (run.state.model_state for run in runs)
    plain_mean, mean = (paths.flatten(tree) for tree in statistics)
    assert not np.allclose(plain_mean["batch_stats.bn.mean"], mean["state.batch_stats.bn.mean"])


def test_a_resumed_run_of_an_adapter_ends_bit_identical(runs, tmp_path):
    plain, adapted = runs
    arguments = dict(load_from=dict(path=plain.work_dir), custom_hooks=EMA)  # only its weights
    make_runner(tmp_path, ADAPTED, train_cfg=dict(max_epochs=2), **arguments).train()
    resumed = make_runner(tmp_path, ADAPTED, resume=True, **arguments)
    jax.tree.map(np.testing.assert_array_equal, resumed.train().params, adapted.state.params)


def test_an_export_has_the_evaluated_weights_with_the_updates_added(runs, tmp_path):
    adapted = runs[1]
    merged, state = adapted.model.merge_weights(*adapted.eval_variables()[""])
    expected = export_params(merged, tmp_path / "expected.safetensors", batch_stats=state)
    file = tmp_path / "model.safetensors"
    assert main(["ckpt", "export", adapted.work_dir, str(file), "--batch-stats"]) == 0
    exported = load_file(file)
    assert exported.keys() == expected.keys()
    assert {"fc1.weight", "head.weight", "bn.running_mean"} < exported.keys()
    for name, tensor in exported.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)


def test_an_adapter_loads_its_own_checkpoint(runs, tmp_path):
    adapted = runs[1]
    tested = make_runner(tmp_path, ADAPTED, load_from=adapted.work_dir)
    tested.val()
    own, state, predict = tested.state, adapted.eval_variables()[""], jax.jit(adapted.model.predict)
    np.testing.assert_allclose(predict(own.params, own.model_state, BATCH), predict(*state, BATCH), rtol=1e-5)


def test_replicas_load_and_export_the_same_weights(runs, tmp_path):
    parallel = dict(type="DataParallel", mesh=dict(data=2), devices=2)
    arguments = dict(load_from=runs[0].work_dir, train_cfg=dict(max_epochs=1), parallel=parallel)
    runner = make_runner(tmp_path / "run", ADAPTED, **arguments)
    frozen = runner.train().model_state["frozen"]["fc1"]["kernel"]
    kernel = np.asarray(runs[0].state.params["fc1"]["kernel"])
    np.testing.assert_array_equal(frozen, kernel)  # once, for both replicas
    pair = runner.state.params["fc1"]["kernel"]
    tensors = export_params(tmp_path / "run", tmp_path / "model.safetensors")
    np.testing.assert_allclose(tensors["fc1.weight"].T, kernel + pair["lora_a"] @ pair["lora_b"], rtol=1e-5, atol=1e-6)


def test_the_fixed_parameters_are_sharded_by_the_rules_for_the_model(tmp_path):
    parallel = dict(type="Pjit", mesh=dict(data=2, tensor=2), devices=4, rules=[("fc1.kernel", (None, "tensor"))])
    runner = make_runner(tmp_path, ADAPTED, train_cfg=dict(max_epochs=1), parallel=parallel)
    kernel = runner.train().model_state["frozen"]["fc1"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (64, 4)
