"""Modules of Equinox in runs and in loops by hand, against the loops of its documentation."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine import Runner, load_model
from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel, Role, parameter_roles
from jengine.optim import build_optim_wrapper
from tests.refusals import check_refusal
from tests.runner.conftest import build_runner

pytestmark = pytest.mark.foreign
eqx = pytest.importorskip("equinox")

_rng = np.random.default_rng(0)
IMAGES = _rng.normal(size=(32, 6)).astype(np.float32)
DATA = {"image": IMAGES, "label": (IMAGES[:, 0] > 0).astype(np.int32)}


class Net(eqx.Module):
    """A network with statistics, dropout, functions, numbers and an integer table."""

    fc: eqx.nn.Linear
    norm: eqx.nn.BatchNorm
    ln: eqx.nn.LayerNorm
    mlp: eqx.nn.MLP
    dropout: eqx.nn.Dropout
    order: jax.Array

    def __init__(self, key):
        keys = jax.random.split(key)
        self.fc = eqx.nn.Linear(6, 8, use_bias=False, key=keys[0])
        self.norm = eqx.nn.BatchNorm(8, "batch", mode="batch")
        self.ln = eqx.nn.LayerNorm(8)
        self.mlp = eqx.nn.MLP(8, 2, 8, 1, key=keys[1])
        self.dropout = eqx.nn.Dropout(0.1)
        self.order = jnp.arange(6)[::-1]

    def __call__(self, x, state, key=None):
        x, state = self.norm(self.fc(x[self.order]), state)
        return self.mlp(self.ln(self.dropout(x, key=key))), state


def forward(model, state, x, keys=None):
    call = jax.vmap(model, axis_name="batch", in_axes=(0, None, None if keys is None else 0), out_axes=(0, None))
    return call(x, state, keys)


def compute_loss(model, model_state, batch, rng):  # as the documentation writes it
    keys = jax.random.split(rng, len(batch["image"]))
    logits, model_state = forward(model, model_state, batch["image"], keys)
    return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"]).mean(), model_state


def make_model():
    return FunctionalModel(
        init=lambda: eqx.nn.make_with_state(Net)(jax.random.key(0)),
        loss=compute_loss,
        predict=lambda model, model_state, batch: forward(model, model_state, batch["image"])[0],
    )


ADAMW = dict(
    optimizer=dict(type="AdamW", lr=1e-2, weight_decay=0.1),
    paramwise_cfg=dict(norm_decay_mult=0.0, bias_decay_mult=0.0, custom_keys={"fc": dict(lr_mult=0.1)}),
)
EMA = [dict(type="EMAHook", momentum=0.1)]
EVALUATION = dict(
    val_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)), val_cfg=dict(), val_evaluator=dict(type="Accuracy")
)


def make_runner(work_dir, epochs=2, model=None, **changes):
    arguments = dict(
        train_dataloader=dict(
            batch_size=8, dataset=ArrayDataset(DATA), sampler=dict(type="DefaultSampler", shuffle=False)
        ),
        train_cfg=dict(max_epochs=epochs), optim_wrapper=ADAMW, randomness=dict(seed=0), custom_hooks=EMA,
        default_hooks={},
    )  # fmt: skip
    return build_runner(work_dir, model or make_model(), **{**arguments, **EVALUATION, **changes})


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    runner = make_runner(tmp_path_factory.mktemp("equinox") / "run")
    runner.train()
    return runner


def test_a_run_equals_the_documented_loop(tmp_path):
    runner = make_runner(tmp_path, optim_wrapper=optax.adam(1e-2), custom_hooks=[])
    state = runner.train()
    model, model_state = eqx.nn.make_with_state(Net)(jax.random.key(0))
    tx = optax.adam(1e-2)
    opt_state = tx.init(eqx.filter(model, eqx.is_inexact_array))

    @eqx.filter_jit
    def make_step(model, model_state, opt_state, batch, rng):
        grads, model_state = eqx.filter_grad(compute_loss, has_aux=True)(model, model_state, batch, rng)
        updates, opt_state = tx.update(grads, opt_state)
        return eqx.apply_updates(model, updates), model_state, opt_state

    for i in range(8):
        batch = jax.tree.map(lambda x, i=i: x[8 * (i % 4) : 8 * (i % 4) + 8], DATA)
        rng = jax.random.fold_in(state.key, i)
        model, model_state, opt_state = make_step(model, model_state, opt_state, batch, rng)
    trained, trained_state = runner.module(train=True)
    assert jax.tree.structure(trained) == jax.tree.structure(model)
    for found, expected in ((trained, model), (trained_state, model_state)):
        found, expected = (paths.flatten(eqx.filter(tree, eqx.is_array)) for tree in (found, expected))
        for path, leaf in expected.items():
            np.testing.assert_allclose(found[path], leaf, rtol=1e-6, atol=1e-6, err_msg=path)


def test_parameters_have_the_paths_of_the_modules_and_all_else_is_kept(run):
    assert list(paths.flatten(run.state.params)) == [
        "fc.weight", "ln.bias", "ln.weight", "mlp.layers.0.bias", "mlp.layers.0.weight",
        "mlp.layers.1.bias", "mlp.layers.1.weight", "norm.bias", "norm.weight",
    ]  # fmt: skip
    state = paths.flatten(run.state.model_state)
    assert list(state) == [
        "frozen.order", "state.norm.batch_counter", "state.norm.batch_state_index.0", "state.norm.batch_state_index.1"
    ]  # fmt: skip
    np.testing.assert_array_equal(state["frozen.order"], np.arange(6)[::-1])
    assert int(state["state.norm.batch_counter"]) == 8
    settings = run.optim_wrapper.param_settings
    assert settings["fc.weight"]["lr"] == pytest.approx(1e-3)
    decays = {path: values["weight_decay"] for path, values in settings.items() if values["weight_decay"]}
    assert list(decays) == ["fc.weight", "mlp.layers.0.weight", "mlp.layers.1.weight"]
    assert list(run.state.hook_state["EMAHook"].params) == ["fc", "ln", "mlp", "norm"]


def test_a_resumed_run_ends_bit_identical_and_chunks_agree(run, tmp_path):
    make_runner(tmp_path / "parts", epochs=1).train()
    parts = make_runner(tmp_path / "parts", resume=True)
    parts.train()
    chunked = make_runner(tmp_path / "chunked", train_cfg=dict(max_epochs=2, steps_per_call=4)).train()
    for item in ("params", "model_state"):
        expected = getattr(run.state, item)
        jax.tree.map(np.testing.assert_array_equal, getattr(parts.state, item), expected)
        for found, leaf in zip(jax.tree.leaves(getattr(chunked, item)), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(found, leaf, rtol=1e-5, atol=1e-6)


def test_the_trained_module_predicts_in_inference_mode_as_the_loaded_model(run):
    module, model_state = run.module()
    assert module.dropout.inference
    logits, _ = forward(module, model_state, DATA["image"])
    loaded = load_model(run.work_dir, model=make_model())
    np.testing.assert_allclose(loaded(DATA), logits, rtol=1e-5, atol=1e-6)


def test_replicas_share_what_is_not_trained(tmp_path):
    state = make_runner(tmp_path, epochs=1, parallel=dict(type="DataParallel", devices=2)).train().model_state
    assert state["frozen"]["order"].shape == (6,)
    assert state["state"]["norm"]["batch_counter"].shape == (2,)


def test_a_loop_by_hand_has_groups_by_the_types_of_the_modules():
    model = eqx.nn.MLP(6, 2, 8, 1, key=jax.random.key(0))
    wrapper = build_optim_wrapper(
        model, dict(optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.5),
                    paramwise_cfg=dict(bias_decay_mult=0.0, custom_keys={"layers.0": dict(lr_mult=0.1)}))
    )  # fmt: skip
    params = eqx.filter(model, eqx.is_inexact_array)
    opt_state = wrapper.init(params)
    updates, _ = jax.jit(wrapper.update)(jax.tree.map(jnp.zeros_like, params), opt_state, params)
    new = eqx.apply_updates(model, updates)
    np.testing.assert_allclose(new.layers[0].weight, model.layers[0].weight * (1 - 0.1 * 0.1 * 0.5), rtol=1e-6)
    np.testing.assert_allclose(new.layers[1].weight, model.layers[1].weight * (1 - 0.1 * 0.5), rtol=1e-6)
    np.testing.assert_array_equal(new.layers[1].bias, model.layers[1].bias)


@pytest.mark.parametrize(
    ("init", "module_types", "error", "words"),
    [
        (lambda: eqx.nn.make_with_state(Net)(jax.random.key(0)), {}, TypeError, ["got an eqx.nn.State", "`init`"]),
        (lambda: eqx.nn.Linear(2, 2, key=jax.random.key(0)), {"fc": "Norm"}, ConfigError, ["`module_types`", "got 'fc'"]),
    ],
    ids=["a state that the loss does not take", "a type of no module"],
)
def test_what_the_model_does_not_take_is_refused(init, module_types, error, words):
    model = FunctionalModel(init, lambda model, batch: 0.0, module_types=module_types)
    check_refusal(lambda: model.init(jax.random.key(0), DATA), error, *words)


def test_the_page_about_equinox_runs(run_page):
    names = run_page("equinox.md")
    assert names["logits"].shape == (32, 2)
    assert names["network"].dropout.inference
    assert np.isfinite(names["loss"])


def test_a_module_with_a_typed_key_is_saved_when_its_data_fail(tmp_path):
    class Noisy(eqx.Module):
        w: jax.Array
        key: jax.Array

    def batches():
        yield from [{"x": np.ones((4, 3), np.float32)}] * 5
        raise OSError("the disk is gone")

    model = FunctionalModel(
        lambda: Noisy(jnp.zeros(3), jax.random.key(0)),
        lambda module, batch: jnp.square(batch["x"] @ module.w + jax.random.normal(module.key) - 1),
    )
    cfg = dict(train_dataloader=batches, optim_wrapper=optax.sgd(0.1), train_cfg=dict(by_epoch=False, max_iters=9))
    with pytest.raises(OSError, match="the disk is gone"):
        Runner(model, tmp_path / "run", **cfg).train()
    assert [path.name for path in (tmp_path / "run").glob("iter_*")] == ["iter_5"]


class NonTrainable(eqx.Module):  # as that of paramax and flowjax
    tree: jax.Array

    def unwrap(self):
        return jax.lax.stop_gradient(self.tree)


class Scaled(eqx.Module):
    w: jax.Array
    scale: NonTrainable

    def __call__(self, x):
        return x @ (self.w * self.scale.unwrap())


def make_scaled():
    return Scaled(jnp.ones(6), NonTrainable(jnp.full(6, 2.0)))


def test_arrays_whose_gradients_a_module_stops_do_not_decay(tmp_path):
    model = FunctionalModel(make_scaled, lambda model, batch: jnp.square(model(batch["image"]) - batch["label"]))
    decaying = dict(optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.1))
    runner = Runner(
        model, tmp_path, train_dataloader=[DATA], train_cfg=dict(by_epoch=False, max_iters=5), optim_wrapper=decaying
    )
    runner.train()
    np.testing.assert_array_equal(runner.module().scale.tree, np.full(6, 2.0))
    assert list(paths.flatten(runner.state.params)) == ["w"]
    # and in a loop by hand, with and without rules
    for rules in ({}, dict(paramwise_cfg=dict(norm_decay_mult=0.0))):
        wrapper = build_optim_wrapper(make_scaled(), {**decaying, **rules})
        params = make_scaled()
        updates, _ = wrapper.update(jax.tree.map(jnp.zeros_like, params), wrapper.init(params), params)
        np.testing.assert_array_equal(updates.scale.tree, np.zeros(6))
        np.testing.assert_allclose(updates.w, -0.1 * 0.1 * np.ones(6), rtol=1e-6)


def own_step(state, batch, ctx):
    network, norm_state = MODEL_OF_OWN_STEP.merge(state.params, state.model_state, train=True)
    assert isinstance(network, Net)

    def loss(network):
        return compute_loss(network, norm_state, batch, ctx.rng)

    return ctx.update(state, loss)


MODEL_OF_OWN_STEP = FunctionalModel(lambda: eqx.nn.make_with_state(Net)(jax.random.key(0)), train_step=own_step)


@pytest.mark.parametrize("chunk", [1, 4])
def test_a_step_of_ones_own_gets_the_module(chunk, tmp_path):
    length = dict(max_epochs=2, steps_per_call=chunk)
    changes = dict(optim_wrapper=optax.adam(1e-2), custom_hooks=[], train_cfg=length)
    expected = make_runner(tmp_path / "built_in", **changes).train()
    unevaluated = dict(val_dataloader=None, val_cfg=None, val_evaluator=None)
    runner = make_runner(tmp_path / "own", model=MODEL_OF_OWN_STEP, **changes, **unevaluated)
    state = runner.train()
    for item in ("params", "model_state"):
        leaves = paths.flatten(getattr(expected, item))
        for path, leaf in paths.flatten(getattr(state, item)).items():
            np.testing.assert_allclose(leaf, leaves[path], rtol=1e-5, atol=1e-6, err_msg=path)
    assert isinstance(runner.module()[0], Net)


def test_gradients_of_single_examples_of_a_module_are_summed(tmp_path):
    def one(network, image, label):
        return jnp.square(network(image)[0] - label)

    def train_step(state, batch, ctx):
        each = jax.vmap(lambda x, y: ctx.gradients(state, lambda network: one(network, x, y)))(*batch.values())
        clipped, _ = optax.per_example_global_norm_clip(jax.tree.leaves(each.grads), 0.1)
        grads = jax.tree.structure(each.grads).unflatten([ctx.sum(g) / 32 for g in clipped])
        return ctx.apply(state, grads, {"loss": each.metrics["loss"].mean()})

    model = FunctionalModel(lambda: eqx.nn.Linear(6, 1, key=jax.random.key(0)), train_step=train_step)
    states = [
        Runner(model, tmp_path / str(devices), train_dataloader=[DATA], train_cfg=dict(by_epoch=False, max_iters=3),
               optim_wrapper=optax.sgd(1.0), parallel=dict(type="DataParallel", devices=devices)).train()
        for devices in (1, 4)
    ]  # fmt: skip
    network = eqx.nn.Linear(6, 1, key=jax.random.key(0))
    for _ in range(3):
        grads = jax.vmap(jax.grad(one), (None, 0, 0))(network, *DATA.values())
        flat = np.concatenate([np.reshape(g, (32, -1)) for g in (grads.weight, grads.bias)], axis=1)
        factor = np.minimum(1, 0.1 / np.linalg.norm(flat, axis=1))
        network = jax.tree.map(lambda p, g: p - jnp.tensordot(factor, g, 1) / 32, network, grads)  # noqa: B023
    for state in states:
        np.testing.assert_allclose(state.params["weight"], network.weight, rtol=0, atol=1e-6)
        np.testing.assert_allclose(state.params["bias"], network.bias, rtol=0, atol=1e-6)


def test_the_last_layer_alone_is_trained(tmp_path):
    def make_network():
        return eqx.nn.MLP(6, 2, 8, depth=1, key=jax.random.key(0))

    def loss(network, batch):
        logits = jax.vmap(network)(batch["image"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])

    model = FunctionalModel(make_network, loss, trainable=["layers.1"])
    runner = Runner(
        model, tmp_path, train_dataloader=[DATA], train_cfg=dict(by_epoch=False, max_iters=3), optim_wrapper=ADAMW
    )
    runner.prepare_training()
    start = runner.module()
    runner.train()
    network = runner.module()
    np.testing.assert_array_equal(network.layers[0].weight, start.layers[0].weight)
    assert (network.layers[1].weight != start.layers[1].weight).all()
    assert list(paths.flatten(runner.state.params)) == ["layers.1.bias", "layers.1.weight"]


def test_the_roles_of_modules_are_those_that_the_loss_tells():
    class Network(eqx.Module):
        conv: eqx.nn.Conv2d
        norm: eqx.nn.GroupNorm
        attention: eqx.nn.MultiheadAttention
        cell: eqx.nn.GRUCell
        labels: eqx.nn.Embedding
        last: eqx.nn.Linear

        def __init__(self, key):
            keys = jax.random.split(key, 5)
            self.conv = eqx.nn.Conv2d(3, 8, 3, key=keys[0])
            self.norm = eqx.nn.GroupNorm(2, 8)
            self.attention = eqx.nn.MultiheadAttention(2, 8, use_query_bias=True, key=keys[1])
            self.cell = eqx.nn.GRUCell(8, 8, key=keys[2])
            self.labels = eqx.nn.Embedding(5, 8, key=keys[3])
            self.last = eqx.nn.Linear(8, 3, key=keys[4])

        def __call__(self, x, label):
            x = self.norm(self.conv(x)).reshape(8, -1).T + self.labels(label)
            x = x + self.attention(x, x, x)
            return self.last(jax.lax.scan(lambda h, y: (self.cell(y, h), None), jnp.zeros(8), x)[0])

    model = FunctionalModel(
        init=lambda rng: Network(rng),
        loss=lambda params, batch: jnp.mean(jax.vmap(params)(batch["x"], batch["label"]) ** 2),
    )
    batch = {"x": jnp.zeros((2, 3, 5, 5)), "label": jnp.zeros(2, jnp.int32)}
    params, _ = jax.eval_shape(model.init, jax.random.key(0), batch)
    roles = parameter_roles(model, params, batch=batch)
    hidden = Role("hidden", (1,), (0,))  # Equinox has the outputs first
    assert {path: role for path, role in roles.items() if "bias" not in path} == {
        "conv.weight": Role("input", (1, 2, 3), (0,)),
        "norm.weight": Role("norm", (), (0,)),
        **{f"attention.{name}_proj.weight": hidden for name in ("query", "key", "value", "output")},
        "cell.weight_ih": dataclasses.replace(hidden, parts=3),
        "cell.weight_hh": dataclasses.replace(hidden, parts=3),
        "labels.weight": Role("embedding", (0,), (1,)),
        "last.weight": Role("head", (1,), (0,)),
    }
    assert {role.kind for path, role in roles.items() if "bias" in path} == {"bias", "norm"}
