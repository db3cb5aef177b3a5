"""Building an optimizer from a config, an Optimizer or an optax transformation."""

import numpy as np
import optax
import pytest

from jengine.optim import SGD, build_optim_wrapper
from jengine.optim.optimizers.optimizer_builder import build_optimizer
from tests.refusals import check_refusal

PARAMS = {"w": np.ones(2, np.float32)}


def first_update(optimizer):
    wrapper = build_optim_wrapper(PARAMS, dict(optimizer=optimizer))
    updates, _ = wrapper.update({"w": np.ones(2, np.float32)}, wrapper.init(PARAMS), PARAMS)
    return np.asarray(updates["w"])


@pytest.mark.parametrize("flag", ["foreach", "fused", "capturable", "differentiable"])
def test_flags_of_pytorchs_kernels_have_no_effect(flag):
    built = build_optimizer({"type": "SGD", "lr": 0.1, "momentum": 0.9, flag: True})
    assert built.name == "SGD"
    assert flag not in built.defaults
    assert built.defaults["momentum"] == 0.9


def test_an_optimizer_is_returned_unchanged():
    optimizer = SGD(lr=0.1)
    assert build_optimizer(optimizer) is optimizer


def test_a_transformation_of_optax_makes_its_own_updates():
    np.testing.assert_allclose(first_update(optax.sgd(0.5)), [-0.5, -0.5])


def test_multi_steps_of_optax_updates_in_every_second_call():
    wrapper = build_optim_wrapper(PARAMS, dict(optimizer=optax.MultiSteps(optax.sgd(0.5), every_k_schedule=2)))
    state, grads = wrapper.init(PARAMS), {"w": np.ones(2, np.float32)}
    first, state = wrapper.update(grads, state, PARAMS)
    second, state = wrapper.update(grads, state, PARAMS)
    np.testing.assert_allclose(first["w"], [0, 0])
    np.testing.assert_allclose(second["w"], [-0.5, -0.5])


@pytest.mark.parametrize(
    ("cfg", "error", "words"),
    [
        ((dict(type="SGD", lr=0.1),), TypeError, ["a dict", "got tuple"]),
        (3, TypeError, ["'type'", "got int: 3"]),
        (dict(type="SGDD", lr=0.1), KeyError, ["did you mean 'SGD'"]),
        (dict(type="SGD", lr=0.1, fuse=True), TypeError, ["SGD", "'fuse'"]),
        (dict(type="SGD", lr=0.1, momentum=1.5), ValueError, ["momentum`", "[0, 1]", "got 1.5"]),
        (dict(type="RMSprop", alpha=1.5), ValueError, ["alpha`", "[0, 1]", "got 1.5"]),
        (dict(type="Lamb", max_grad_norm=0), ValueError, ["max_grad_norm`", "above 0", "None", "got 0"]),
        (dict(type="adamw", learning_rate=0.1, b1=2), ValueError, ["b1`", "got 2"]),
        (dict(type="adamw", learning_rate=0.1, eps=-1), ValueError, ["eps`", "at least 0", "got -1"]),
        (dict(type="sgd", learning_rate=0.1, momentum=1.5), ValueError, ["momentum`", "[0, 1]"]),
        (dict(type="adamw", learning_rate=0.1, eps=True), TypeError, ["eps`", "at least 0", "got True"]),
    ],
)
def test_invalid_optimizer_is_rejected_with_its_config_path(cfg, error, words):
    check_refusal(lambda: build_optimizer(cfg), error, *words, "`optimizer")
