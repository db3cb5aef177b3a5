"""The groups, hyperparameters, state dict and errors of an optimizer wrapper."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from jengine.config import OPTIM_WRAPPER_CONSTRUCTORS
from jengine.optim import (
    SGD,
    Adam,
    AdamW,
    AmpOptimWrapper,
    OptimWrapper,
    OptimWrapperDict,
    build_optim_wrapper,
)
from tests.refusals import check_refusal

PARAMS = {"backbone": {"w": jnp.ones(2)}, "head": {"w": jnp.ones(3)}}
TWO_GROUPS = [{"params": "backbone", "lr": 0.01}, {"params": "head", "lr": 0.001}]


def test_learning_rates_and_momenta():
    single = OptimWrapper(SGD(lr=0.01))
    assert (single.get_lr(), single.get_momentum()) == ({"lr": [0.01]}, {"momentum": [0]})
    assert OptimWrapper(Adam()).get_momentum() == {"momentum": [0.9]}
    wrapper = OptimWrapper(SGD(lr=0.01).with_groups(TWO_GROUPS))
    assert wrapper.get_lr() == {"base_lr": [0.01], "lr": [0.01, 0.001]}
    for group in [*wrapper.param_groups, wrapper.base_param_settings]:
        group["lr"] *= 0.1
    assert wrapper.get_lr()["lr"] == pytest.approx([0.001, 0.0001])
    assert wrapper.get_lr()["base_lr"] == pytest.approx([0.001])
    assert list(wrapper.get_lr()) == ["base_lr", "lr"]


def test_missing_settings_of_groups_come_from_the_optimizer():
    wrapper = OptimWrapper(SGD(lr=0.1, momentum=0.9).with_groups([{"params": "backbone"}, TWO_GROUPS[1]]))
    wrapper.init(PARAMS)
    settings = wrapper.param_settings
    assert {path: (s["lr"], s["momentum"]) for path, s in settings.items()} == {
        "backbone.w": (0.1, 0.9), "head.w": (0.001, 0.9),
    }  # fmt: skip


def test_parameters_in_no_group_are_frozen():
    wrapper = OptimWrapper(SGD(lr=1.0, momentum=0.9).with_groups([{"params": ["head.w"]}]))
    state = wrapper.init(PARAMS)
    assert jax.tree.leaves(optax.tree.get(state, "trace"))[0].shape == (3,)
    updates, _ = wrapper.update(PARAMS, state, PARAMS)
    assert not updates["backbone"]["w"].any()
    assert updates["head"]["w"].all()


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"params": "bakcbone"}], ["got 'bakcbone'", "closest: backbone"]),
        ([{"params": "head"}, {"params": "head.w"}], ["'head.w'", "got 0 and 1"]),
        ([{"lr": 0.1}], ["params"]),
        (
            [{"params": "head.w[0]"}, {"params": "head.w[2]"}],
            ["'head.w'", "got none for layers [1]"],
        ),
    ],
)
def test_groups_that_do_not_fit(groups, words):
    check_refusal(lambda: OptimWrapper(SGD(lr=1.0).with_groups(groups)).init(PARAMS), (ValueError, KeyError), *words)


def test_groups_with_different_flags_have_separate_chains():
    groups = [{"params": "backbone"}, {"params": "head", "nesterov": True}]
    wrapper = OptimWrapper(SGD(lr=0.1, momentum=0.9).with_groups(groups))
    updates, _ = wrapper.update(PARAMS, wrapper.init(PARAMS), PARAMS)
    # the first momentum is the gradient; nesterov adds 0.9 of it
    np.testing.assert_allclose(updates["backbone"]["w"], -0.1 * PARAMS["backbone"]["w"], rtol=1e-6)
    np.testing.assert_allclose(updates["head"]["w"], -0.19 * PARAMS["head"]["w"], rtol=1e-6)


def test_integer_leaf_is_rejected_by_name_unless_frozen():
    params = {"table": np.arange(3), "w": np.ones(2, np.float32)}
    with pytest.raises(TypeError, match="parameter 'table' must have a floating dtype to be trained, got int64"):
        build_optim_wrapper(params, {"optimizer": {"type": "SGD"}})
    frozen = {"custom_keys": {"table": {"requires_grad": False}}}
    wrapper = build_optim_wrapper(params, {"optimizer": {"type": "SGD", "lr": 1.0}, "paramwise_cfg": frozen})
    params = jax.tree.map(jnp.asarray, params)
    _, grads = wrapper.value_and_grad(lambda p: jnp.sum(p["w"] * p["table"][0]))(params, wrapper.init(params))
    updates, _ = wrapper.update(grads, wrapper.init(params), params)
    assert updates["table"].dtype == params["table"].dtype
    assert not updates["table"].any()


def test_changes_of_hyperparams_do_not_retrace():
    wrapper = AmpOptimWrapper(
        optimizer=AdamW(lr=0.1).with_groups([{"params": "backbone"}, {"params": "head", "lr": 0.2}]),
        loss_scale={"init_scale": 4.0, "growth_interval": 1},
    )
    traces = []

    @jax.jit
    def step(params, state, hyperparams):
        traces.append(1)
        updates, state = wrapper.update(jax.tree.map(jnp.ones_like, params), state, params, hyperparams)
        return optax.apply_updates(params, updates), state

    params, state, seen = PARAMS, wrapper.init(PARAMS), []
    for t in range(4):
        for group in wrapper.param_groups:
            group.update(lr=0.1 / (t + 1), weight_decay=0.01 * t, betas=(0.9 - 0.1 * t, 0.999))
        params, state = step(params, state, {**wrapper.hyperparams, "frozen:head": np.float32(t % 2)})
        seen.append(float(params["head"]["w"][0]))
    assert len(traces) == 1
    assert seen[0] == seen[1] != seen[2] == seen[3]


def test_hyperparams_are_vectors_over_groups():
    wrapper = OptimWrapper(SGD(lr=0.01).with_groups(TWO_GROUPS))
    assert wrapper.hyperparams["learning_rate"].dtype == np.float32
    np.testing.assert_allclose(wrapper.hyperparams["learning_rate"], [0.01, 0.001])
    params = {f"p{i}": jnp.ones(()) for i in range(70)}
    many = OptimWrapper(SGD(lr=0.1).with_groups([{"params": p, "lr": 0.01 * i} for i, p in enumerate(params)]))
    assert len(many.hyperparams["learning_rate"]) == 70
    updates, _ = jax.jit(many.update)(params, many.init(params), params, many.hyperparams)
    np.testing.assert_allclose([updates["p0"], updates["p69"]], [0.0, -0.69], rtol=1e-6)


def test_hyperparam_shared_by_groups_cannot_be_changed_in_one_of_them():
    wrapper = OptimWrapper(SGD(lr=0.1, momentum=0.9).with_groups(TWO_GROUPS))
    assert {name: value.shape for name, value in wrapper.hyperparams.items()} == {
        "learning_rate": (2,), "momentum": (),
    }  # fmt: skip
    wrapper.param_groups[1]["momentum"] = 0.0
    with pytest.raises(ValueError, match=r"`momentum` of SGD must stay 0.9 in the groups \[0, 1\].*got \[0.9, 0.0\]"):
        _ = wrapper.hyperparams


def test_numpy_scalars_are_numbers():
    assert OptimWrapper(SGD(lr=np.float32(0.5))).get_lr() == {"lr": [0.5]}


def test_temporarily_frozen_parameters_keep_value_and_state():
    wrapper = OptimWrapper(Adam(lr=0.1), clip_grad={"max_norm": 100})
    state = wrapper.init(PARAMS)
    _, state = wrapper.update(PARAMS, state, PARAMS)
    hyperparams = {**wrapper.hyperparams, "frozen:head": np.float32(1)}
    updates, new = wrapper.update(PARAMS, state, PARAMS, hyperparams)
    assert not updates["head"]["w"].any()
    assert updates["backbone"]["w"].all()
    before, mean = (optax.tree.get(s, "mu") for s in (state, new))
    np.testing.assert_array_equal(mean["head"]["w"], before["head"]["w"])
    assert not np.array_equal(mean["backbone"]["w"], before["backbone"]["w"])
    assert float(wrapper.metrics(new, new)["grad_norm"]) == pytest.approx(2**0.5)  # two unfrozen elements of 1


def test_state_dict_round_trip():
    wrapper = OptimWrapper(SGD(lr=0.1, momentum=0.9).with_groups(TWO_GROUPS), accumulative_counts=2)
    state = wrapper.accumulate(PARAMS, wrapper.init(PARAMS))
    _, state = wrapper.update(PARAMS, state, PARAMS)
    wrapper.param_groups[0]["lr"] = 0.5
    saved = wrapper.state_dict(state)
    assert json.loads(json.dumps(wrapper.group_state_dict())) == {k: v for k, v in saved.items() if k != "state"}

    other = OptimWrapper(SGD(lr=0.1, momentum=0.9).with_groups(TWO_GROUPS), accumulative_counts=2)
    loaded = other.load_state_dict(saved, other.init(PARAMS))
    assert other.get_lr() == wrapper.get_lr()
    jax.tree.map(np.testing.assert_array_equal, loaded, state)
    single = OptimWrapper(SGD(lr=0.1, momentum=0.9))
    with pytest.raises(ValueError, match="must have 1 parameter groups, as this run, got 2"):
        single.load_group_state_dict(saved)
    with pytest.raises(ValueError, match=r"pytree structure error: (?s:.*)with 4 child keys"):
        OptimWrapper(Adam()).load_state_dict(saved, OptimWrapper(Adam()).init(PARAMS))


def test_betas_survive_json():
    wrapper = OptimWrapper(Adam(betas=(0.8, 0.99)))
    wrapper.load_group_state_dict(json.loads(json.dumps(wrapper.group_state_dict())))
    assert wrapper.param_groups[0]["betas"] == (0.8, 0.99)


def test_config_is_left_unchanged_and_type_is_optional():
    cfg = ConfigDict(
        {"optimizer": {"type": "SGD", "lr": 0.1, "fused": True}, "clip_grad": {"max_norm": 1.0, "type": "norm"}}
    )
    before = cfg.to_json()
    wrapper = build_optim_wrapper(PARAMS, cfg)
    assert cfg.to_json() == before
    assert type(wrapper) is OptimWrapper
    cfg = {
        "_delete_": True,
        "type": "AmpOptimWrapper",
        "accumulative_counts": 2,
        "optimizer": {"type": "SGD", "_delete_": True},
    }
    wrapper = build_optim_wrapper(PARAMS, cfg)
    assert (type(wrapper), wrapper.accumulative_counts) == (AmpOptimWrapper, 2)


def test_constructor_gets_its_arguments_by_name():
    seen = {}

    @OPTIM_WRAPPER_CONSTRUCTORS.register_module(force=True)
    class MultipleOptimWrapperConstructor:
        def __init__(self, optim_wrapper_cfg, paramwise_cfg=None):
            seen.update(cfg=optim_wrapper_cfg, paramwise_cfg=paramwise_cfg)

        def __call__(self, model):
            return OptimWrapperDict(**{name: OptimWrapper(SGD().with_groups([{"params": name}])) for name in model})

    cfg = {"constructor": "MultipleOptimWrapperConstructor", "a": 1, "paramwise_cfg": {"b": 2}}
    wrapper = build_optim_wrapper(PARAMS, cfg)
    assert isinstance(wrapper, OptimWrapperDict)
    assert seen == {"cfg": {"a": 1}, "paramwise_cfg": {"b": 2}}
    assert list(wrapper.init(PARAMS)) == ["backbone", "head"]


@pytest.mark.parametrize(
    ("cfg", "error", "words"),
    [
        ({"optimizer": ({"type": "SGD"},)}, TypeError, ["a dict", "got tuple"]),
        ({"type": "OptimWrapper"}, AssertionError, ["'optimizer'", "got ['type']"]),
        ({"optimizer": {"type": "SDG"}}, KeyError, ["did you mean 'SGD'"]),
        ({"optimizer": {"type": "SGD", "momentun": 0.9}}, TypeError, ["'momentun'", "did you mean 'momentum'"]),
        ({"optimizer": {"type": "SGD"}, "clip_gard": {}}, TypeError, ["did you mean 'clip_grad'"]),
        ([], TypeError, ["a dict", "got list"]),
    ],
)
def test_invalid_config(cfg, error, words):
    check_refusal(lambda: build_optim_wrapper(PARAMS, cfg), error, *words)


def test_low_precision_parameters_have_float32_state():
    params = {"w": jnp.ones(3, jnp.bfloat16)}
    wrapper = OptimWrapper(Adam(lr=0.5))
    state = wrapper.init(params)
    updates, state = wrapper.update(params, state, params)
    assert {leaf.dtype for leaf in jax.tree.leaves(state) if leaf.ndim} == {jnp.dtype("float32")}
    assert optax.apply_updates(params, updates)["w"].dtype == jnp.bfloat16


def test_value_and_grad_with_aux_and_keywords():
    wrapper = OptimWrapper(SGD(lr=0.1))

    def loss(params, x, *, scale):
        total = jnp.sum(params["w"] * x) * scale
        return total, {"total": total}

    params = {"w": jnp.ones(2)}
    (value, aux), grads = wrapper.value_and_grad(loss, has_aux=True)(params, wrapper.init(params), 3.0, scale=2.0)
    assert (float(value), float(aux["total"])) == (12.0, 12.0)
    np.testing.assert_array_equal(grads["w"], [6.0, 6.0])


def test_names_of_mmengine():
    wrapper = OptimWrapper(dict(type="SGD", lr=0.1, foreach=True))
    assert (wrapper.optimizer.name, wrapper.defaults["lr"]) == ("SGD", 0.1)
    amp = AmpOptimWrapper(optimizer=SGD(lr=0.1), dtype="float16")
    assert amp.loss_scaler is amp.loss_scale
    assert amp.loss_scaler.growth_interval == 2000


@pytest.mark.parametrize("wrapper", [OptimWrapper(SGD(lr=0.1)), AmpOptimWrapper(optimizer=SGD(lr=0.1))])
@pytest.mark.parametrize(
    ("method", "arguments"),
    [
        ("update_params", (jnp.float32(1.0),)),
        ("update_params", (jnp.float32(1.0), {}, {})),
        ("backward", (jnp.float32(1.0),)),
        ("step", ()),
        ("zero_grad", ()),
        ("state_dict", ()),
        ("load_state_dict", ({},)),
    ],
)
def test_calls_as_in_mmengine_without_parameters_or_state_are_errors(wrapper, method, arguments):
    with pytest.raises(TypeError):
        getattr(wrapper, method)(*arguments)


def test_the_forward_context_in_low_precision_requires_a_loss_that_the_wrapper_calls():
    wrapper, params, x = AmpOptimWrapper(optimizer=SGD(lr=0.1)), {"w": jnp.ones((4, 2))}, jnp.ones((3, 4))

    def loss(params, x, apply):
        with wrapper.optim_context(None):
            return apply(params, x).astype(jnp.float32).mean()

    def apply(params, x):
        return x @ params["w"]

    with pytest.raises(RuntimeError, match=r"JAX has no autocast: .*wrapper.autocast\(apply\)\(params, x\)"):
        jax.grad(loss)(params, x, apply)
    state = wrapper.init(params)
    with pytest.raises(ValueError, match="must compute the network in bfloat16"):
        wrapper.update_params(lambda params, x: loss(params, x, apply), params, state, x)
    _, _, value = wrapper.update_params(lambda params, x: loss(params, x, wrapper.autocast(apply)), params, state, x)
    assert value == 4.0
