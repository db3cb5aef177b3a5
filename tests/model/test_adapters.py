import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.config import MODELS
from jengine.config.errors import ConfigError
from jengine.extras.networks import SmallCNN, SmallViT
from jengine.extras.plan.flops import count_flops
from jengine.model import (
    CastModel,
    CrossEntropy,
    FunctionalModel,
    LinenModel,
    MeanSquaredError,
    Model,
    NnxModel,
    Precision,
    autocast,
    get_precision,
)

BATCH = {"image": np.linspace(0, 1, 4 * 8 * 8, dtype=np.float32).reshape(4, 8, 8, 1), "label": np.array([0, 1, 2, 1])}
FLAT = {"image": BATCH["image"].reshape(4, 64), "label": BATCH["label"]}


class LinenNet(nn.Module):
    @nn.compact
    def __call__(self, x, train: bool = False):
        x = nn.Dense(6, name="fc")(x)
        x = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="bn")(x)
        x = nn.Dropout(0.5, deterministic=not train)(x)
        return nn.Dense(3, name="head")(x)


class NnxNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(64, 6, rngs=rngs), nnx.Linear(6, 6, rngs=rngs)])
        self.bn = nnx.BatchNorm(6, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.second = nnx.Dropout(0.5, rngs=rngs)
        self.head = nnx.Linear(6, 3, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(self.second(self.dropout(self.bn(x))))


@pytest.fixture(scope="module", params=["linen", "nnx"])
def model(request):
    if request.param == "linen":
        return LinenModel(LinenNet(), CrossEntropy())
    return NnxModel(NnxNet, CrossEntropy())


@pytest.fixture(scope="module")
def variables(model):
    return jax.jit(model.init)(jax.random.key(0), FLAT)


@pytest.fixture(scope="module")
def loss(model):
    return jax.jit(lambda p, s, rng: model.loss(p, s, FLAT, rng=rng, hyperparams={}))


def test_running_statistics_are_model_state_and_are_updated_in_training(model, variables, loss):
    params, state = variables
    statistics = jax.tree.leaves(state)
    assert len(statistics) == 2  # mean and variance
    _, new_state = loss(params, state, jax.random.key(1))
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert all(not np.allclose(a, b) for a, b in zip(statistics, jax.tree.leaves(new_state), strict=True))


def test_dropout_depends_on_the_key_of_the_iteration(variables, loss):
    params, state = variables
    first, again, other = (loss(params, state, jax.random.key(k))[0]["loss"] for k in (1, 1, 2))
    assert first.shape == (4,)  # one number per example
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)


def test_prediction_is_deterministic(model, variables):
    params, state = variables
    predict = jax.jit(model.predict)
    np.testing.assert_array_equal(predict(params, state, FLAT), predict(params, state, FLAT))
    assert predict(params, state, FLAT).shape == (4, 3)


def test_gradients_of_the_head_are_nonzero(variables, loss):
    params, state = variables
    grads = jax.jit(jax.grad(lambda p: loss(p, state, jax.random.key(0))[0]["loss"].sum()))(params)
    assert all(np.any(np.asarray(g) != 0) for k, g in grads["head"].items())


def test_init_returns_string_keys_and_records_module_types(model, variables):
    from jengine.config.paths import flatten

    assert "head.kernel" in flatten(variables[0])
    assert model.module_types["bn"] == "BatchNorm"
    assert model.module_types["head"] in ("Dense", "Linear")


def test_two_dropouts_of_an_nnx_module_draw_different_masks():
    class TwoDropouts(nnx.Module):
        def __init__(self, rngs):
            self.a, self.b = nnx.Dropout(0.5, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return jnp.stack([self.a(x), self.b(x)])

    model = NnxModel(TwoDropouts, lambda outputs, batch: {"loss": outputs}, inputs="image")
    params, state = jax.jit(model.init)(jax.random.key(0), FLAT)
    masks = model.loss(params, state, {"image": jnp.ones((100,))}, rng=jax.random.key(3), hyperparams={})[0]["loss"]
    assert 20 < int((masks[0] != masks[1]).sum()) < 80


def test_functions_receive_the_arguments_in_their_signature():
    model = FunctionalModel(
        init=lambda rng: {"w": jnp.array([2.0])},
        loss=lambda params, batch, hyperparams: hyperparams["weight"] * (params["w"] * batch["x"]),
        predict=lambda params, batch: params["w"] * batch["x"],
    )
    params, state = model.init(jax.random.key(0), None)
    batch = {"x": jnp.array([1.0, 3.0])}
    losses, state = model.loss(params, state, batch, rng=jax.random.key(0), hyperparams={"weight": 10.0})
    assert state == {}
    np.testing.assert_array_equal(losses["loss"], [20.0, 60.0])
    np.testing.assert_array_equal(model.predict(params, state, batch), [2.0, 6.0])


def test_functions_can_update_the_model_state():
    model = FunctionalModel(
        init=lambda rng, batch: ({"w": jnp.ones(())}, {"n": jnp.zeros(())}),
        loss=lambda params, model_state, batch: ({"loss": params["w"]}, {"n": model_state["n"] + 1}),
    )
    params, state = model.init(jax.random.key(0), None)
    _, state = model.loss(params, state, None, rng=jax.random.key(0), hyperparams={})
    assert state["n"] == 1.0
    with pytest.raises(ConfigError, match="`model.predict` must be a function for validation, test, prediction"):
        model.predict(params, state, None)


@pytest.mark.parametrize("module", [SmallCNN(widths=(2, 4)), SmallViT(width=8, depth=1, heads=2)])
def test_small_networks_return_logits(module):
    shapes = jax.eval_shape(module.init, jax.random.key(0), BATCH["image"])
    assert jax.eval_shape(module.apply, shapes, BATCH["image"]).shape == (4, 10)


def test_models_are_built_from_nested_configs():
    model = MODELS.build(
        dict(type="LinenModel", module=dict(type="SmallCNN", widths=(2,)), loss=dict(type="CrossEntropy"))
    )
    assert model.module.widths == (2,)
    with pytest.raises(TypeError, match="SmallCNN has no argument 'width'; did you mean 'widths'"):
        MODELS.build(dict(type="LinenModel", module=dict(type="SmallCNN", width=(2,)), loss=dict(type="CrossEntropy")))


def test_cross_entropy_matches_a_hand_computed_value():
    logits = jnp.log(jnp.array([[0.7, 0.2, 0.1]]))
    plain = CrossEntropy()(logits, {"label": jnp.array([0])})["loss"]
    smooth = CrossEntropy(label_smoothing=0.3)(logits, {"label": jnp.array([0])})["loss"]
    np.testing.assert_allclose(plain, -np.log(0.7), rtol=1e-6)
    np.testing.assert_allclose(smooth, -(0.8 * np.log(0.7) + 0.1 * np.log(0.2) + 0.1 * np.log(0.1)), rtol=1e-6)
    with pytest.raises(ValueError, match=r"must be a number in \[0, 1\), got 1.0"):
        CrossEntropy(label_smoothing=1.0)


def test_mean_squared_error_returns_one_value_per_example():
    error = MeanSquaredError()(jnp.array([[1.0, 3.0], [0.0, 0.0]]), {"target": jnp.zeros((2, 2))})["loss"]
    np.testing.assert_allclose(error, [5.0, 0.0])


TARGETS = np.full((4,), 3000.7, np.float32)  # rounded to 3008 in bfloat16


def make_linen_regression(loss):
    class Net(nn.Module):
        @nn.compact
        def __call__(self, x, train: bool = False):
            x = nn.BatchNorm(use_running_average=not train)(nn.Dense(5)(x))
            return nn.Dense(3)(x)

    return LinenModel(Net(), loss, inputs="image")


def make_nnx_regression(loss):
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.params, self.bn = nnx.Linear(64, 5, rngs=rngs), nnx.BatchNorm(5, rngs=rngs)
            self.head = nnx.Linear(5, 3, rngs=rngs)

        def __call__(self, x):
            return self.head(self.bn(self.params(x)))

    return NnxModel(lambda rngs: Net(rngs), loss, inputs="image")


@pytest.mark.parametrize("make", [make_linen_regression, make_nnx_regression])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_precision_policy_casts_only_the_network(make, dtype):
    dtypes = {}

    def loss(outputs, batch):
        dtypes.update(outputs=outputs.dtype.name, target=batch["target"].dtype.name)
        return jnp.square(outputs.mean(axis=1) - batch["target"])

    batch = {**FLAT, "target": TARGETS}
    inner = make(loss)
    model = CastModel(inner, Precision(compute=dtype))
    params, state = jax.jit(model.init)(jax.random.key(0), batch)
    compute = jax.jit(lambda model, *args: model.loss(*args, rng=jax.random.key(0), hyperparams={}), static_argnums=0)
    losses, new_state = compute(model, params, state, batch)
    assert dtypes == {"outputs": "float32", "target": "float32"}
    # outputs are about 1, in any dtype
    np.testing.assert_allclose(losses["loss"], 3000.7**2, rtol=2e-3)
    assert {leaf.dtype.name for leaf in jax.tree.leaves((losses, new_state, params))} == {"float32"}
    program = jax.make_jaxpr(lambda p: compute(model, p, state, batch))(params)
    assert count_flops(program) == {dtype: 2 * 4 * 64 * 5 + 2 * 4 * 5 * 3}
    predictions = jax.jit(model.predict)(params, state, batch)
    assert predictions.dtype == jnp.float32
    np.testing.assert_array_equal(predictions, predictions.astype(dtype).astype(jnp.float32))


def make_functional_regression(network):
    return FunctionalModel(
        init=lambda: {"w": jnp.full((64,), 1 / 64)},
        loss=lambda params, batch: jnp.square(network(params, batch["image"]) - batch["target"]),
        predict=lambda params, batch: network(params, batch["image"]),
    )


def apply_linear(params, x):
    return x @ params["w"]


def test_autocast_computes_functions_in_the_dtype_of_the_policy():
    batch = {"image": np.full((4, 64), 1.001, np.float32), "target": TARGETS}  # 1.001 is 1 in bfloat16
    model = make_functional_regression(autocast(apply_linear))
    params, state = model.init(jax.random.key(0), batch)
    cast = CastModel(model, Precision(compute="bfloat16"))
    losses, _ = cast.loss(params, state, batch, rng=jax.random.key(0), hyperparams={})
    np.testing.assert_allclose(losses["loss"], (3000.7 - 1) ** 2, rtol=1e-6)
    np.testing.assert_array_equal(cast.predict(params, state, batch), np.ones(4))
    losses, _ = model.loss(params, state, batch, rng=jax.random.key(0), hyperparams={})  # without a policy
    np.testing.assert_allclose(losses["loss"], (3000.7 - 1.001) ** 2, rtol=1e-6)
    np.testing.assert_allclose(model.predict(params, state, batch), 1.001, rtol=1e-6)


def test_a_module_with_a_low_precision_dtype_works_without_autocast():
    module = nn.Dense(1, dtype=jnp.bfloat16)

    class CustomModel(Model):
        def init(self, rng, batch):
            return module.init(rng, batch["image"])["params"], {}

        def loss(self, params, model_state, batch, *, rng, hyperparams):
            outputs = module.apply({"params": params}, batch["image"]).astype(jnp.float32)
            return {"loss": jnp.square(outputs[:, 0] - batch["target"])}, model_state

    batch = {"image": FLAT["image"], "target": TARGETS}
    model = CastModel(CustomModel(), Precision(compute="bfloat16"))
    params, state = model.init(jax.random.key(0), batch)
    losses, _ = model.loss(params, state, batch, rng=jax.random.key(0), hyperparams={})
    np.testing.assert_allclose(losses["loss"], 3000.7**2, rtol=2e-3)


def test_a_policy_casts_parameters_and_predictions_but_not_the_model_state():
    def loss(params, model_state, batch):
        return {"loss": params["w"] * batch["x"]}, {"m": params["w"].astype(jnp.bfloat16)}

    inner = FunctionalModel(
        init=lambda: ({"w": jnp.ones(())}, {"m": jnp.ones(())}), loss=loss, predict=lambda params: params["w"]
    )
    model = CastModel(inner, Precision(compute="bfloat16", params="float16", output="bfloat16"))
    params, state = model.init(jax.random.key(0), None)
    losses, state = model.loss(params, state, {"x": jnp.ones((2,))}, rng=jax.random.key(0), hyperparams={})
    assert params["w"].dtype == jnp.float16
    assert losses["loss"].dtype == state["m"].dtype == jnp.float32
    assert model.predict(params, state, None).dtype == jnp.bfloat16


def test_get_precision_builds_a_policy():
    assert get_precision(None) is None
    assert get_precision(dict(compute="float16", output="float16")) == Precision("float16", "float32", "float16")
    with pytest.raises(ValueError, match="compute` must be 'float32' or .* got 'bfloat61'"):
        get_precision("bfloat61")
    with pytest.raises(TypeError, match="computes"):
        get_precision(dict(computes="float16"))
