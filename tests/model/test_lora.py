import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jengine import Runner, paths
from jengine.checkpoint import export_params, list_arrays
from jengine.cli import main
from jengine.data import ArrayDataset
from jengine.errors import ConfigError
from jengine.model import FunctionalModel, LinenModel, LoRA, NnxModel
from jengine.registry import MODELS

VIT = dict(
    type="LinenModel",
    module=dict(type="SmallViT", num_classes=10, patch=4, width=16, depth=2, heads=2),
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
    for mine, plain in zip(jax.tree.leaves(base), jax.tree.leaves(model.model.init(jax.random.key(0), BATCH)), strict=True):
        np.testing.assert_allclose(mine, plain, rtol=1e-6)  # the initial parameters of the model itself
    np.testing.assert_array_equal(model.predict(params, model_state, BATCH), model.model.predict(*base, BATCH))


def test_the_merged_model_predicts_and_computes_losses_as_the_adapter(vit):
    model, params, model_state = vit
    params = with_random_updates(params)
    merged = model.merge_weights(params, model_state)
    np.testing.assert_allclose(model.predict(params, model_state, BATCH), model.model.predict(*merged, BATCH), rtol=1e-6)
    (a, b), kernel = params["layers_0"]["attn"]["query"]["kernel"].values(), model_state["frozen"]
    expected = kernel["layers_0"]["attn"]["query"]["kernel"] + 8 / 4 * (a @ b).reshape(16, 2, 8)
    np.testing.assert_allclose(paths.flatten(merged[0])[QUERY], expected, rtol=1e-5)
    arguments = dict(rng=jax.random.key(1), hyperparams={})
    losses, new_state = model.loss(params, model_state, BATCH, **arguments)
    np.testing.assert_allclose(losses["loss"], model.model.loss(*merged, BATCH, **arguments)[0]["loss"], rtol=1e-5)
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
    np.testing.assert_allclose(merged["blocks"]["fc"]["kernel"][3], 1 + 2 * pair["lora_a"][3] @ pair["lora_b"][3], rtol=1e-5)


def test_parameters_may_be_any_pytree():
    base = FunctionalModel(lambda: [jnp.ones((4, 4)), (jnp.ones(4), jnp.ones((4, 2)))], lambda params: jnp.zeros(()))
    model = LoRA(base, targets=["^0$|^.0$"], rank=1)
    trained, model_state = model.init(jax.random.key(0), {})
    assert list(paths.flatten(trained)) == ["0.lora_a", "0.lora_b"]
    merged, _ = model.merge_weights(trained, model_state)
    assert jax.tree.structure(merged) == jax.tree.structure(base.init(jax.random.key(0), {})[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(targets=["atn.query.kernel"]), "`targets` must match a kernel .*, got 'atn.query.kernel'; closest: .*attn.query"),
        (dict(targets=["bias"]), "`targets` must match a kernel"),
        (dict(targets=["zzz"]), "the first are cls_token, head.kernel"),
        (dict(targets=["attn"], trainable=["heat"]), "`trainable` must match a parameter, got 'heat'; closest: head"),
        (dict(targets=["patch_embed"], rank=17), r"`rank` must be at most 16 for the kernel patch_embed.kernel \[16, 16\]"),
    ],
)  # fmt: skip
def test_a_rule_that_matches_nothing_is_an_error_with_the_closest_paths(arguments, message):
    with pytest.raises(ConfigError, match=message):
        jax.eval_shape(LoRA(VIT, **arguments).init, jax.random.key(0), BATCH)


@pytest.mark.parametrize(
    ("targets", "error", "message"),
    [
        (["(attn"], ConfigError, r"a rule must be a regular expression, got '\(attn'"),
        ([], ConfigError, "at least one rule"),
        ([("attn", dict(rnk=4))], TypeError, "Target has no argument 'rnk'; did you mean 'rank'"),
        ([("attn", dict(rank=0))], ConfigError, r"rank` must be an integer of at least 1, got 0"),
    ],
)
def test_bad_rules_are_refused_by_the_constructor(targets, error, message):
    with pytest.raises(error, match=message):
        LoRA(VIT, targets)


def test_an_nnx_model_is_adapted():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.fc1, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.fc2 = nnx.Linear(8, 3, rngs=rngs)

        def __call__(self, x):
            return self.fc2(nnx.relu(self.norm(self.fc1(x))))

    batch = {"x": np.ones((4, 4), np.float32), "label": np.zeros(4, np.int32)}
    model = LoRA(NnxModel(Net, dict(type="CrossEntropy"), inputs="x"), targets=[r"fc\d\.weight"], rank=2)  # torch alias
    params, model_state = model.init(jax.random.key(0), batch)
    assert list(params) == ["fc1", "fc2"]
    _, new_state = model.loss(params, model_state, batch, rng=jax.random.key(0), hyperparams={})
    old, new = (paths.flatten(state["state"]) for state in (model_state, new_state))
    assert not np.allclose(old["norm.mean"], new["norm.mean"])


def make_runner(work_dir, model, **changes):
    arguments = dict(
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(BATCH)),
        train_cfg=dict(max_epochs=3),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.01, weight_decay=0.1)),
        val_dataloader=dict(batch_size=8, dataset=ArrayDataset(BATCH)),
        val_cfg=dict(), val_evaluator=dict(type="Accuracy"), randomness=dict(seed=0),
    )  # fmt: skip
    return Runner(model, work_dir, **{**arguments, **changes})


def test_a_run_loads_plain_weights_trains_only_the_updates_resumes_and_exports(tmp_path):
    plain = make_runner(tmp_path / "plain", VIT, train_cfg=dict(max_epochs=1))
    plain.train()
    cfg = dict(type="LoRA", model=VIT, rank=2, targets=["attn.*kernel"], trainable=["head"])
    arguments = dict(load_from=str(tmp_path / "plain"), custom_hooks=[dict(type="EMAHook", momentum=0.5)])
    runner = make_runner(tmp_path / "lora", cfg, **arguments)
    state = runner.train()
    before, after = paths.flatten(plain.state.params), paths.flatten(state.model_state["frozen"])
    for path, leaf in after.items():
        np.testing.assert_array_equal(leaf, before[path], err_msg=path)
    mu = optax.tree.get(state.opt_state, "mu")
    assert jax.tree.structure(mu) == jax.tree.structure(state.params)
    assert float(abs(state.params["layers_0"]["attn"]["query"]["kernel"]["lora_b"]).max()) > 0
    assert not np.allclose(state.params["head"]["kernel"], before["head.kernel"])
    assert jax.tree.structure(state.hook_state["EMAHook"].params) == jax.tree.structure(state.params)

    # A resumed run has the same end, bit for bit.
    first = make_runner(tmp_path / "resumed", cfg, **{**arguments, "train_cfg": dict(max_epochs=2)})
    first.train()
    second = make_runner(tmp_path / "resumed", cfg, resume=True, custom_hooks=arguments["custom_hooks"])
    jax.tree.map(np.testing.assert_array_equal, second.train().params, state.params)

    # The evaluated weights are exported under the names of the model itself, with the updates added.
    model = runner.model
    merged, _ = model.merge_weights(*runner.eval_variables()[""])
    assert main(["ckpt", "export", str(tmp_path / "lora"), str(tmp_path / "model.safetensors")]) == 0
    expected = export_params(merged, tmp_path / "expected.safetensors")
    exported = export_params(tmp_path / "lora", tmp_path / "model.safetensors")
    assert exported.keys() == expected.keys()
    for name, tensor in exported.items():
        np.testing.assert_allclose(tensor, expected[name], rtol=1e-6, atol=1e-6, err_msg=name)
    assert f"params.{QUERY}.lora_a" in list_arrays(tmp_path / "lora")

    # The checkpoint of the adapter can be loaded by the adapter: what it predicts stays the same.
    tested = make_runner(tmp_path / "tested", cfg, load_from=str(tmp_path / "lora"))
    tested.val()
    np.testing.assert_allclose(
        model.predict(tested.state.params, tested.state.model_state, BATCH),
        model.model.predict(merged, {}, BATCH), rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def test_the_fixed_parameters_are_sharded_by_the_rules_for_the_model(tmp_path):
    if len(jax.devices()) < 4:
        pytest.skip("needs four devices")
    runner = make_runner(
        tmp_path, dict(type="LoRA", model=VIT, targets=["attn"], rank=2), train_cfg=dict(max_epochs=1),
        parallel=dict(type="Pjit", mesh=dict(data=2, tensor=2), devices=4, rules=[("fc1.kernel", (None, "tensor"))]),
    )  # fmt: skip
    kernel = runner.train().model_state["frozen"]["layers_0"]["fc1"]["kernel"]
    assert kernel.sharding.shard_shape(kernel.shape) == (16, 16)


def test_linen_model_stays_available_for_adapters():
    assert isinstance(LoRA(VIT, ["attn"]).model, LinenModel)
