"""Optimizer wrappers built from states and modules of NNX, and from models of this engine."""

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from jengine.model import LinenModel, MeanSquaredError, NnxModel
from jengine.optim import build_optim_wrapper

RULES = dict(norm_decay_mult=0.0, bias_lr_mult=2.0)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Linear(2, 2, rngs=rngs) for _ in range(2)])
        self.norm = nnx.BatchNorm(2, rngs=rngs)
        self.affine = Affine()
        self.drop = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = self.drop(layer(x))
        return self.affine(self.norm(x))


class Affine(nnx.Module):
    """A module with a scale and a bias that is not a norm, although it has the parameter names of one."""

    def __init__(self):
        self.scale = nnx.Param(jnp.ones(2))
        self.bias = nnx.Param(jnp.zeros(2))

    def __call__(self, x):
        return x * self.scale + self.bias


def net():
    return Net(nnx.Rngs(0))


def build(source, paramwise_cfg=RULES, module_types=None, **optimizer):
    cfg = dict(optimizer=dict(type="SGD", lr=0.5, weight_decay=1.0, **optimizer), paramwise_cfg=paramwise_cfg)
    return build_optim_wrapper(source, cfg, module_types=module_types)


def settings(wrapper):
    return {path: (entry["lr"], entry["weight_decay"]) for path, entry in wrapper.param_settings.items()}


# (lr, weight decay) by the rules for a module, whose types are known
EXPECTED = {
    "affine.bias": (1.0, 1.0), "affine.scale": (0.5, 1.0), "layers.0.bias": (1.0, 1.0), "layers.0.kernel": (0.5, 1.0),
    "layers.1.bias": (1.0, 1.0), "layers.1.kernel": (0.5, 1.0), "norm.bias": (0.5, 0.0), "norm.scale": (0.5, 0.0),
}  # fmt: skip


def test_rules_match_an_nnx_module_by_its_names_and_types():
    # the running mean and variance, the random stream and its count are not parameters
    assert settings(build(net())) == EXPECTED


def test_without_rules_only_the_parameters_of_an_nnx_module_are_trained():
    assert set(settings(build(net(), None))) == set(EXPECTED)


@pytest.mark.parametrize("get_state", [nnx.state, lambda module: nnx.state(module, nnx.Param)])
def test_rules_match_an_nnx_state_like_its_arrays(get_state):
    state = get_state(net())
    # without types, a module with a scale and a bias is a norm
    by_name = {**EXPECTED, "affine.bias": (0.5, 0.0), "affine.scale": (0.5, 0.0)}
    assert settings(build(state)) == by_name
    assert settings(build(nnx.to_pure_dict(nnx.state(net(), nnx.Param)))) == by_name
    types = {"affine": "Affine", "norm": "BatchNorm"}
    assert settings(build(state, module_types=types)) == EXPECTED


def test_an_nnx_module_trains():
    module = net()
    wrapper = build(module, dict(custom_keys={"norm": dict(requires_grad=False)}))
    graphdef, params, rest = nnx.split(module, nnx.Param, ...)
    opt_state = wrapper.init(params)

    def loss_fn(params):
        return jnp.mean(nnx.merge(graphdef, params, rest, copy=True)(jnp.ones((4, 2))) ** 2)

    _, grads = wrapper.value_and_grad(loss_fn)(params, opt_state)
    updates, _ = wrapper.update(grads, opt_state, params)
    trained = optax.apply_updates(params, updates)
    assert jax.tree.structure(trained) == jax.tree.structure(params)
    np.testing.assert_array_equal(trained["norm"]["scale"].get_value(), module.norm.scale.get_value())
    # SGD: p - lr (g + weight_decay p)
    before, grad = module.layers[0].kernel.get_value(), grads["layers"][0]["kernel"].get_value()
    np.testing.assert_allclose(trained["layers"][0]["kernel"].get_value(), before - 0.5 * (grad + before), rtol=1e-6)


def test_nnx_optimizer_takes_the_wrapper_as_an_optax_transformation():
    module = net()
    before = module.layers[0].bias.get_value(), module.norm.scale.get_value()
    optimizer = nnx.Optimizer(module, build(module).tx, wrt=nnx.Param)
    ones = jax.tree.map(jnp.ones_like, nnx.state(module, nnx.Param))
    optimizer.update(module, ones)
    np.testing.assert_allclose(module.layers[0].bias.get_value(), before[0] - 1.0)  # zeros at first: no decay
    np.testing.assert_allclose(module.norm.scale.get_value(), before[1] - 0.5)  # a norm's scale has no decay


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.LayerNorm()(nn.Dense(2)(x))


def models():
    return [
        LinenModel(Linen(), MeanSquaredError()),
        NnxModel(lambda rngs: nnx.Linear(2, 2, rngs=rngs), MeanSquaredError()),
    ]


@pytest.mark.parametrize("model", models())
def test_the_hint_of_the_error_works(model):
    params, _ = model.init(jax.random.key(0), {"image": jnp.ones((1, 2))})
    actual = settings(build(params, module_types=model.module_types))
    assert {path for path, (lr, _) in actual.items() if lr == 1.0} in ({"Dense_0.bias"}, {"bias"})


@pytest.mark.parametrize("model", models())
def test_without_rules_a_model_may_have_no_parameters_yet(model):
    wrapper = build_optim_wrapper(model, {"optimizer": {"type": "SGD", "lr": 1.0}})
    params, _ = model.init(jax.random.key(0), {"image": jnp.ones((1, 2))})
    updates, _ = wrapper.update(params, wrapper.init(params), params)
    jax.tree.map(lambda u, p: np.testing.assert_array_equal(u, -p), updates, params)


@pytest.mark.parametrize("source", [Linen(), object(), {"w": "text"}, {"w": 1.0}])
def test_source_without_arrays_is_rejected(source):
    with pytest.raises(
        TypeError, match=r"the parameters must be a pytree of arrays, an nnx.State or an nnx.Module, got"
    ):
        build(source)
