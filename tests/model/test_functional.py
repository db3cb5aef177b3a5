"""Which arguments the functions of a FunctionalModel receive."""

import functools
import typing

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.config.errors import ConfigError
from jengine.evaluation import MeanLoss
from jengine.model import FunctionalModel
from jengine.optim import OptimWrapper, build_optim_wrapper
from jengine.train import build_train_step, create_train_state

BATCH = {"x": jnp.array([1.0, 3.0])}


def run(init, loss, predict=None, hyperparams=None):
    model = FunctionalModel(init, loss, predict)
    params, state = model.init(jax.random.key(0), BATCH)
    losses, state = model.loss(params, state, BATCH, rng=jax.random.key(1), hyperparams=hyperparams or {})
    predictions = None if predict is None else model.predict(params, state, BATCH)
    return losses["loss"], state, predictions


def test_positional_functions_receive_key_parameters_and_batch():
    def init(key):
        return {"w": jax.random.uniform(key, (1,))}

    weight = jax.random.uniform(jax.random.key(0), (1,))
    loss, state, predictions = run(init, lambda p, b: p["w"] * b["x"], lambda p, b, /: 2 * p["w"] * b["x"])
    np.testing.assert_allclose(loss, weight * BATCH["x"])
    np.testing.assert_allclose(predictions, 2 * weight * BATCH["x"])
    assert state == {}


def test_other_names_mix_with_known_ones():
    loss, state, _ = run(
        lambda k, example: ({"w": example["x"]}, {"n": 0}),
        lambda rng, model_state, p, b, scale=3.0: (scale * p["w"] * b["x"], {"n": model_state["n"] + 1}),
    )
    np.testing.assert_allclose(loss, 3 * BATCH["x"] ** 2)
    assert state == {"n": 1}
    loss, _, _ = run(lambda: {"w": 2.0}, lambda params, data, hyperparams: hyperparams["a"] * params["w"] * data["x"],
                     hyperparams={"a": 5.0})  # fmt: skip
    np.testing.assert_allclose(loss, 10 * BATCH["x"])


def test_functions_with_keyword_arguments_receive_all_of_them():
    def loss(p, b, **others):
        assert sorted(others) == ["hyperparams", "model_state", "rng"]
        return p["w"], others["model_state"]

    value, _, _ = run(functools.partial(lambda scale, **_: ({"w": scale}, {}), 2.0), loss)
    assert value == 2.0


def test_module_types_say_what_a_norm_is():
    params = {"a": {"w": jnp.ones(2), "b": jnp.ones(2)}, "c": {"w": jnp.ones((2, 2)), "b": jnp.ones(2)}}
    model = FunctionalModel(lambda: params, lambda p, b: 0.0, module_types={"a": "BatchNorm"})
    shapes, _ = model.init(jax.random.key(0), None)
    cfg = dict(optimizer=dict(type="SGD", lr=1.0, weight_decay=1.0), paramwise_cfg=dict(norm_decay_mult=0.0))
    wrapper = build_optim_wrapper(shapes, cfg, module_types=model.module_types)
    decays = {path: entry["weight_decay"] for path, entry in wrapper.param_settings.items()}
    assert decays == {"a.w": 0.0, "a.b": 0.0, "c.w": 1.0, "c.b": 1.0}
    model = FunctionalModel(lambda: params, lambda p, b: 0.0, module_types={"aa": "BatchNorm"})
    with pytest.raises(ConfigError, match="`module_types` must be paths of modules, got 'aa'; closest: a"):
        model.init(jax.random.key(0), None)


class ActorCritic(typing.NamedTuple):
    actor: jax.Array
    critic: jax.Array


def test_a_named_tuple_of_two_fields_is_the_parameters_and_not_a_pair():
    def init():
        return ActorCritic(jnp.ones(3), jnp.zeros(2))

    model = FunctionalModel(init, train_step=lambda state, batch, ctx: (state, {"loss": 0.0}))
    params, model_state = model.init(jax.random.key(0), None)
    assert isinstance(params, ActorCritic)
    assert model_state == {}
    with pytest.raises(TypeError, match=r"must return \(params, model_state\), .* got ActorCritic"):
        FunctionalModel(init, lambda params, model_state, batch: 0.0).init(jax.random.key(0), None)


class Losses(typing.NamedTuple):
    policy_loss: jax.Array
    value_loss: jax.Array
    entropy: jax.Array


def joint(params, batch):
    return Losses((params["w"] * batch["x"]).mean(), jnp.square(params["w"]), 0.5)


def own_step(state, batch, ctx):
    return ctx.update(state, lambda params: joint(params, batch))


@pytest.mark.parametrize("functions", [dict(loss=joint), dict(train_step=own_step)])
def test_losses_may_be_a_named_tuple(functions):
    model = FunctionalModel(lambda: {"w": jnp.ones(())}, **functions)
    wrapper = OptimWrapper(optax.sgd(0.5))
    state = create_train_state(*model.init(jax.random.key(0), BATCH), wrapper, rng=jax.random.key(0))
    state, metrics = jax.jit(build_train_step(model, wrapper))(state, BATCH, wrapper.hyperparams)
    # the mean of 1 and 3, and 1 squared; 1 - 0.5 * (2 + 2 * 1)
    assert {name: float(value) for name, value in metrics.items()} == {
        "loss": 3.0, "policy_loss": 2.0, "value_loss": 1.0, "entropy": 0.5,
    }  # fmt: skip
    assert float(state.params["w"]) == -1.0


def test_a_mean_loss_may_be_a_named_tuple():
    metric = MeanLoss(lambda outputs, batch: Losses(outputs, 2 * outputs, outputs), parts=["policy_loss", "value_loss", "entropy"])
    state = metric.update(metric.init(), jnp.array([1.0, 3.0]), BATCH)
    assert metric.compute(state) == {"loss": 6.0, "policy_loss": 2.0, "value_loss": 4.0, "entropy": 2.0}
