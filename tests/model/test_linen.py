"""Linen modules in the forms in which people write them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn

from jengine.config.paths import flatten
from jengine.model import CastModel, LinenModel, Precision
from jengine.runner import Runner

BATCH = {"image": np.linspace(-1, 1, 4 * 6, dtype=np.float32).reshape(4, 6), "label": np.array([0, 1, 2, 1])}


def squared(outputs, batch):
    return {"loss": outputs**2}


def compute_loss(model, variables, seed=0):
    step = jax.jit(lambda params, state, rng: model.loss(params, state, BATCH, rng=rng, hyperparams={}))
    return step(*variables, jax.random.key(seed))


class Expert(nn.Module):
    """Sow in all the usual ways, next to state of the usual kinds."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        y = nn.BatchNorm(use_running_average=not train, momentum=0.5)(nn.Dense(6, name="fc")(x))
        carry = self.variable("carry", "pair", lambda: (jnp.zeros(()), jnp.ones(())))
        if train:
            carry.value = (carry.value[0] + 1, carry.value[1])
        self.sow("aux_losses", "balance", jnp.float32(2.0))
        self.sow("reg_loss", "l2", jnp.float32(3.0), init_fn=lambda: jnp.float32(0), reduce_fn=lambda a, b: a + b)
        self.sow("intermediates", "features", y)
        return y


class Experts(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        return Expert(name="b")(Expert(name="a")(x, train), train)


def read_features(outputs, batch, sown):
    return {"loss": outputs**2, "features": sown["intermediates"]["a.features"][0]}


@pytest.fixture(scope="module")
def experts():
    model = LinenModel(
        Experts(),
        read_features,
        sown_losses={"aux_losses": 0.5, "reg_loss": 1.0},
        sown_predictions=("features",),
    )
    return model, jax.jit(model.init)(jax.random.key(0), BATCH)


def test_sown_collections_are_not_state_and_others_are(experts):
    _, (params, state) = experts
    assert set(state) == {"batch_stats", "carry"}
    assert set(params) == {"a", "b"}


def test_sown_values_of_all_modules_are_added_to_the_losses(experts):
    model, (params, state) = experts
    losses, new_state = compute_loss(model, (params, state))
    assert [float(x) for x in losses["balance_loss"]] == [1.0, 1.0]
    assert [float(x) for x in losses["l2_loss"]] == [3.0, 3.0]
    assert losses["features"].shape == (4, 6)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert float(new_state["carry"]["a"]["pair"][0]) == 1.0
    again, _ = compute_loss(model, (params, new_state))
    assert [float(x) for x in again["l2_loss"]] == [3.0, 3.0]  # nothing accumulates over iterations


def test_predictions_contain_selected_sown_values(experts):
    model, variables = experts
    predictions = jax.jit(model.predict)(*variables, BATCH)
    assert set(predictions) == {"outputs", "features"}
    assert set(predictions["features"]) == {"a.features", "b.features"}
    np.testing.assert_allclose(predictions["outputs"], predictions["features"]["b.features"])


def test_undeclared_collections_that_are_sown_are_found():
    model = LinenModel(Experts(), squared)
    variables = model.init(jax.random.key(0), BATCH)
    assert set(variables[1]) == {"batch_stats", "carry"}
    with pytest.raises(
        ValueError, match=r"nothing uses \(aux_losses: a.balance, aux_losses: b.balance, reg_loss: a.l2"
    ):
        compute_loss(model, variables)
    model = LinenModel(Experts(), squared, sown_losses=())
    assert set(compute_loss(model, model.init(jax.random.key(0), BATCH))[0]) == {"loss"}


def test_sown_losses_are_float32_in_low_precision(experts):
    model, variables = experts
    losses, _ = compute_loss(CastModel(model, Precision(compute="bfloat16")), variables)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(losses)} == {"float32"}


class ScanBlock(nn.Module):
    @nn.compact
    def __call__(self, x, train):
        kernel_init = nn.with_partitioning(nn.initializers.lecun_normal(), (None, "model"))
        y = nn.Dense(6, kernel_init=kernel_init, name="fc")(x)
        y = nn.BatchNorm(use_running_average=not train, momentum=0.5, name="norm")(y)
        y = nn.Dropout(0.5, deterministic=not train)(y)
        self.sow("aux_losses", "size", jnp.square(y).mean())
        return y, None


class Scanned(nn.Module):
    """Layers of a scan with rematerialization: stacked parameters, statistics, streams and sown values."""

    @nn.compact
    def __call__(self, x, train: bool = False):
        layers = nn.scan(
            nn.remat(ScanBlock, static_argnums=(2,)),
            variable_axes={"params": 0, "batch_stats": 0, "aux_losses": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=3,
            metadata_params={nn.PARTITION_NAME: "layers"},
        )
        return layers(name="layers")(x, train)[0]


def test_scanned_layers_with_rematerialization_and_named_axes():
    model = LinenModel(Scanned(), squared, sown_losses=("aux_losses",))
    params, state = jax.jit(model.init)(jax.random.key(0), BATCH)
    assert params["layers"]["fc"]["kernel"].shape == (3, 6, 6)
    assert model.logical_axes == {"layers.fc.kernel": ("layers", None, "model")}
    assert model.module_types["layers.norm"] == "BatchNorm"
    assert set(flatten(state)) == {"batch_stats.layers.norm.mean", "batch_stats.layers.norm.var"}
    grads, (losses, new_state) = jax.jit(jax.grad(lambda p: sum_losses(model, p, state), has_aux=True))(params)
    assert np.all(np.any(np.asarray(grads["layers"]["fc"]["kernel"]) != 0, axis=(1, 2)))
    (sizes,) = losses["size_loss"]
    assert sizes.shape == (3,)
    assert jax.tree.structure(new_state) == jax.tree.structure(state)


def sum_losses(model, params, state):
    losses, new_state = model.loss(params, state, BATCH, rng=jax.random.key(0), hyperparams={})
    return losses["main_loss"].sum() + losses["size_loss"][0].sum(), (losses, new_state)


class Noisy(nn.Module):
    @nn.compact
    def __call__(self, x):
        scale = self.param("scale", nn.initializers.ones, ())
        return scale * x + jax.random.normal(self.make_rng("noise"), x.shape)


def test_streams_of_the_prediction_have_a_fixed_key():
    model = LinenModel(Noisy(), squared, rngs=("noise",), predict_rngs=("noise",))
    variables = model.init(jax.random.key(0), BATCH)
    first, other = (compute_loss(model, variables, seed)[0]["loss"] for seed in (1, 2))
    assert not np.allclose(first, other)
    np.testing.assert_array_equal(model.predict(*variables, BATCH), model.predict(*variables, BATCH))


def test_merge_returns_a_bound_module(experts):
    model, (params, state) = experts
    bound = model.merge(params, state)
    np.testing.assert_allclose(bound(BATCH["image"]), model.predict(params, state, BATCH)["outputs"], rtol=1e-6)
    module, variables = bound.unbind()
    assert module == model.module
    assert set(variables) == {"params", "batch_stats", "carry"}
    trained = model.merge(params, state, train=True)
    trained(BATCH["image"], train=True)
    assert float(trained.variables["carry"]["a"]["pair"][0]) == 1.0


def test_parameters_that_exist_only_in_training_are_trained(tmp_path):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            hidden = jnp.tanh(nn.Dense(6, name="stem")(x))
            outputs = nn.Dense(1, name="head")(hidden)
            if not train:
                return outputs
            side = nn.BatchNorm(use_running_average=False, name="side")(hidden)
            return outputs, nn.Dense(1, name="aux")(side)

    def loss(outputs, batch):
        return {
            name: (out[:, 0] - batch["y"]) ** 2 for name, out in zip(("main_loss", "aux_loss"), outputs, strict=True)
        }

    x = np.random.default_rng(0).normal(size=(8, 6)).astype(np.float32)
    batch = {"x": x, "y": x.sum(1)}
    model = LinenModel(Net(), loss=loss, inputs="x")
    params, model_state = model.init(jax.random.key(0), batch)
    assert sorted(params) == ["aux", "head", "side", "stem"]
    assert model.module_types["side"] == "BatchNorm"
    assert list(model_state) == ["batch_stats"]
    alone, _ = LinenModel(Net(), loss=loss, inputs="x").init(jax.random.key(0), batch)
    jax.tree.map(np.testing.assert_array_equal, params, alone)
    state = Runner(
        model, tmp_path, train_dataloader=[batch], train_cfg=dict(max_epochs=2), optim_wrapper=optax.sgd(0.01)
    ).train()
    assert not np.array_equal(state.params["aux"]["kernel"], params["aux"]["kernel"])
    assert not np.array_equal(state.model_state["batch_stats"]["side"]["mean"], np.zeros(6))
    assert model.predict(state.params, state.model_state, batch).shape == (8, 1)
