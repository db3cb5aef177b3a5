"""NNX modules in the forms in which people write them."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.config.paths import flatten
from jengine.model import CastModel, CrossEntropy, NnxModel, Precision
from tests.refusals import check_refusal

BATCH = {"image": np.linspace(-1, 1, 4 * 6, dtype=np.float32).reshape(4, 6), "label": np.array([0, 1, 2, 1])}


def squared(outputs, batch):
    return {"loss": outputs**2}


def compute_loss(model, variables, seed=0):
    step = jax.jit(lambda params, state, rng: model.loss(params, state, BATCH, rng=rng, hyperparams={}))
    return step(*variables, jax.random.key(seed))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 6, rngs=rngs)
        self.norm = nnx.BatchNorm(6, momentum=0.5, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def __call__(self, x):
        mask = self.dropout(jnp.ones_like(x))
        self.sow(nnx.Intermediate, "mask", mask)
        return self.norm(self.linear(x)) * mask


class Stacked(nnx.Module):
    """Three layers with stacked variables and random streams, which a scan applies."""

    def __init__(self, rngs):
        @nnx.split_rngs(splits=3)
        @nnx.vmap(axis_size=3)
        def create(rngs):
            return Block(rngs)

        self.layers = create(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, block: (block(x), None))(x, self.layers)[0]


def read_masks(outputs, batch, sown):
    return {"loss": outputs, "masks": jax.lax.stop_gradient(sown["Intermediate"]["layers.mask"][0])}


@pytest.fixture(scope="module")
def stacked():
    model = NnxModel(Stacked, read_masks)
    return model, jax.jit(model.init)(jax.random.key(0), BATCH)


def test_stacked_layers_have_different_weights_and_masks_and_are_updated(stacked):
    model, (params, state) = stacked
    kernel = params["layers"]["linear"]["kernel"]
    assert kernel.shape == (3, 6, 6)
    assert not np.allclose(kernel[0], kernel[1])
    losses, new_state = compute_loss(model, (params, state))
    masks = losses["masks"]
    assert masks.shape == (3, 4, 6)
    assert set(np.unique(masks)) == {0.0, 2.0}
    assert all(np.any(masks[i] != masks[j]) for i, j in ((0, 1), (0, 2), (1, 2)))
    assert jax.tree.structure(new_state) == jax.tree.structure(state)
    assert not np.allclose(new_state["layers"]["norm"]["mean"][2], 0)


def test_masks_of_stacked_layers_depend_only_on_the_key_of_the_iteration(stacked):
    model, variables = stacked
    first, again, other = (compute_loss(model, variables, seed)[0]["masks"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert np.any(first != other)


def test_stacked_layers_predict_without_dropout(stacked):
    model, (params, state) = stacked
    predictions = jax.jit(model.predict)(params, state, BATCH)
    expected = BATCH["image"]
    for i in range(3):
        layer = jax.tree.map(lambda x, i=i: x[i], params["layers"]["linear"])
        expected = (expected @ layer["kernel"] + layer["bias"]) / np.sqrt(1 + 1e-5)
    np.testing.assert_allclose(predictions, expected, rtol=1e-5, atol=1e-6)


class CallRngs(nnx.Module):
    """A module that receives its random streams in the call."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 3, rngs=rngs)
        self.dropout = nnx.Dropout(0.5)

    def __call__(self, x, rngs=None):
        return self.linear(self.dropout(x, rngs=rngs)) + 0.1 * rngs.noise.normal((3,))


def test_a_call_with_rngs_gets_other_streams_in_each_iteration_and_fixed_ones_in_prediction():
    model = NnxModel(CallRngs, squared)
    variables = model.init(jax.random.key(0), BATCH)
    first, again, other = (compute_loss(model, variables, seed)[0]["loss"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.allclose(first, other)
    np.testing.assert_array_equal(model.predict(*variables, BATCH), model.predict(*variables, BATCH))


def test_a_call_with_a_train_argument_is_told_the_mode():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.scale = nnx.Param(jnp.ones(()))

        def __call__(self, x, *, train):
            return self.scale * jnp.ones(4) * (2.0 if train else 1.0)

    model = NnxModel(Net, squared)
    variables = model.init(jax.random.key(0), BATCH)
    np.testing.assert_array_equal(compute_loss(model, variables)[0]["loss"], 4 * np.ones(4))
    np.testing.assert_array_equal(model.predict(*variables, BATCH), np.ones(4))


class Head(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(6, 3, rngs=rngs)
        self.norm = nnx.BatchNorm(3, rngs=rngs)

    def __call__(self, x):
        y = self.norm(self.linear(x))
        self.sow(nnx.Intermediate, "logits", y)
        return y


@pytest.mark.filterwarnings("ignore:.*nnx.capture")
def test_an_instance_gives_the_initial_values_and_does_not_change():
    module = Head(nnx.Rngs(7))
    module(BATCH["image"])  # leaves running statistics, and a sown value that is not part of the run
    before = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(module)))
    model = NnxModel(module, CrossEntropy())
    params, state = jax.jit(model.init)(jax.random.key(0), BATCH)
    assert set(flatten(params)) == {"linear.kernel", "linear.bias", "norm.scale", "norm.bias"}
    assert set(flatten(state)) == {"norm.mean", "norm.var"}
    np.testing.assert_array_equal(params["linear"]["kernel"], before["linear"]["kernel"])
    np.testing.assert_array_equal(state["norm"]["mean"], before["norm"]["mean"])
    compute_loss(model, (params, state))
    jax.jit(lambda x: jax.tree.map(jnp.zeros_like, x), donate_argnums=0)((params, state))
    jax.tree.map(np.testing.assert_array_equal, nnx.to_pure_dict(nnx.state(module)), before)


class LowRank(nnx.Param):
    """A kind of parameter."""


class Counter(nnx.Variable):
    """A kind of state."""


def test_any_kind_of_variable_is_a_parameter_or_state():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.a = LowRank(jnp.ones((6, 2)))
            self.calls = Counter(0)
            self.memory = nnx.Cache({"sum": jnp.zeros(2), "pair": (jnp.ones(()), jnp.zeros(()))})
            self.table = nnx.data(jnp.arange(2.0))

        def __call__(self, x):
            y = x @ self.a[...] + self.table
            self.calls[...] += 1
            memory = self.memory.get_value()
            self.memory.set_value({"sum": memory["sum"] + y.sum(0), "pair": memory["pair"][::-1]})
            return y

    model = NnxModel(Net, squared)
    params, state = model.init(jax.random.key(0), BATCH)
    assert set(flatten(params)) == {"a"}
    assert set(flatten(state)) == {"calls", "memory.sum", "memory.pair.0", "memory.pair.1", "table"}
    for _ in range(2):
        state = compute_loss(model, (params, state))[1]
    assert int(state["calls"]) == 2
    outputs = BATCH["image"] @ np.ones((6, 2)) + np.arange(2.0)
    np.testing.assert_allclose(state["memory"]["sum"], 2 * outputs.sum(0), rtol=1e-5, atol=1e-5)
    assert float(state["memory"]["pair"]["0"]) == 1.0


def test_shared_modules_have_one_set_of_parameters_that_gets_all_gradients():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Linear(6, 6, use_bias=False, rngs=rngs)
            self.second = self.first
            self.embed = nnx.Embed(6, 6, rngs=rngs)

        def __call__(self, x):
            return self.second(self.first(self.embed.attend(x + self.embed(jnp.array(0)))))

    model = NnxModel(Net, squared)
    params, state = model.init(jax.random.key(0), BATCH)
    assert set(flatten(params)) == {"embed.embedding", "first.kernel"}
    twice = {**params, "first": {"kernel": 2 * params["first"]["kernel"]}}
    factor = model.predict(twice, state, BATCH) / model.predict(params, state, BATCH)
    np.testing.assert_allclose(factor, 4, rtol=1e-4)


def sow_losses(self, x):
    self.sow(nnx.Intermediate, "balance_loss", x.mean())
    self.divergence = Divergence(jnp.square(x).sum(-1))
    return x


class Divergence(nnx.Variable):
    """The kind of a loss."""


class Sowing(nnx.Module):
    def __init__(self, rngs, remat=False):
        self.scale = nnx.Param(jnp.full((), 2.0))
        self.apply = nnx.remat(sow_losses) if remat else sow_losses
        self.inner = nnx.Linear(6, 6, rngs=rngs)

    def __call__(self, x):
        return self.apply(self, self.scale * x)


@pytest.mark.parametrize("remat", [False, True])
def test_sown_values_are_added_to_the_losses_and_are_not_state(remat):
    module = functools.partial(Sowing, remat=remat)
    model = NnxModel(module, squared, sown_losses={"balance_loss": 1.0, "Divergence": 0.1})
    params, state = model.init(jax.random.key(0), BATCH)
    losses, new_state = compute_loss(model, (params, state))
    assert state == new_state == {}
    assert set(losses) == {"main_loss", "balance_loss", "divergence_loss"}
    np.testing.assert_allclose(losses["balance_loss"][0], 2 * BATCH["image"].mean(), atol=1e-6)
    np.testing.assert_allclose(losses["divergence_loss"][0], 0.1 * np.square(2 * BATCH["image"]).sum(-1), rtol=1e-5)


def test_the_loss_function_and_predictions_see_sown_values():
    def loss(outputs, batch, sown):
        return {"loss": sown["Divergence"]["divergence"] + sown["Intermediate"]["balance_loss"][0]}

    model = NnxModel(Sowing, loss, sown_predictions=("divergence",))
    variables = model.init(jax.random.key(0), BATCH)
    expected = np.square(2 * BATCH["image"]).sum(-1)
    np.testing.assert_allclose(compute_loss(model, variables)[0]["loss"], expected + 0.0, rtol=1e-5, atol=1e-6)
    predictions = model.predict(*variables, BATCH)
    np.testing.assert_allclose(predictions["divergence"], expected, rtol=1e-5)
    np.testing.assert_allclose(predictions["outputs"], 2 * BATCH["image"], rtol=1e-6)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({}, ["uses (", "balance_loss", "`sown_losses`"]),
        ({"sown_losses": ("balance",)}, ["`sown_losses`", "got 'balance'", "Div"]),
    ],
)
def test_sown_losses_that_are_not_used_or_not_sown_raise(arguments, words):
    model = NnxModel(Sowing, squared, **arguments)
    variables = model.init(jax.random.key(0), BATCH)
    check_refusal(lambda: compute_loss(model, variables), ValueError, *words)


def test_sown_losses_can_be_ignored():
    model = NnxModel(Sowing, squared, sown_losses=())
    assert set(compute_loss(model, model.init(jax.random.key(0), BATCH))[0]) == {"loss"}


def test_a_policy_computes_stacked_layers_in_low_precision_and_keeps_their_statistics(stacked):
    model, (params, state) = stacked
    cast = CastModel(model, Precision(compute="bfloat16"))
    losses, new_state = compute_loss(cast, (params, state))
    assert {leaf.dtype.name for leaf in jax.tree.leaves((losses, new_state))} == {"float32"}
    mean = np.mean(BATCH["image"] @ params["layers"]["linear"]["kernel"][0], axis=0)
    np.testing.assert_allclose(new_state["layers"]["norm"]["mean"][0], 0.5 * mean, atol=2e-2)


@pytest.mark.parametrize("train", [False, True])
def test_merge_returns_a_module_that_works_on_its_own(stacked, train):
    model, (params, state) = stacked
    module = model.merge(params, state, train=train)
    assert isinstance(module, Stacked)
    assert module.layers.dropout.deterministic is not train
    if not train:
        forward = nnx.capture(lambda module, x: module(x), nnx.Intermediate)
        np.testing.assert_allclose(forward(module, BATCH["image"])[0], model.predict(params, state, BATCH), rtol=1e-5)
