"""Several optimizers from one config, each for one part of the model."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.optim import OptimWrapper, OptimWrapperDict, build_optim_wrapper
from tests.refusals import check_refusal

PARAMS = {"gen": {"w": jnp.ones((2,)), "b": jnp.ones(())}, "disc": {"w": jnp.ones((3,))}, "shared": {"e": jnp.ones(())}}


def sgd(lr, **more):
    return dict(optimizer=dict(type="SGD", lr=lr), **more)


def test_each_optimizer_updates_its_own_part():
    wrappers = build_optim_wrapper(PARAMS, dict(gen=sgd(0.1), disc=sgd(0.5, modules=["disc", "shared"])))
    assert isinstance(wrappers, OptimWrapperDict)
    assert wrappers.get_lr() == {"gen.lr": [0.1], "disc.lr": [0.5]}
    state = wrappers.init(PARAMS)
    grads = optax.tree.ones_like(PARAMS)
    updates, _ = wrappers["disc"].update(grads, state["disc"], PARAMS, wrappers.hyperparams["disc"])
    np.testing.assert_array_equal(updates["gen"]["w"], [0, 0])
    np.testing.assert_array_equal(updates["disc"]["w"], [-0.5] * 3)
    np.testing.assert_array_equal(updates["shared"]["e"], -0.5)


@pytest.mark.parametrize("form", [dict, OptimWrapperDict])
def test_a_built_wrapper_trains_only_the_module_of_its_name(form):
    wrappers = build_optim_wrapper(PARAMS, form(gen=OptimWrapper(optax.sgd(0.1)), disc=OptimWrapper(optax.sgd(0.5))))
    updates, _ = wrappers["disc"].update(optax.tree.ones_like(PARAMS), wrappers.init(PARAMS)["disc"], PARAMS)
    np.testing.assert_array_equal(updates["gen"]["w"], [0, 0])
    np.testing.assert_array_equal(updates["disc"]["w"], [-0.5] * 3)
    np.testing.assert_array_equal(updates["shared"]["e"], 0)
    with pytest.raises(ValueError, match="must have parameters, got 'critic'"):
        build_optim_wrapper(PARAMS, form(gen=OptimWrapper(optax.sgd(0.1)), critic=OptimWrapper(optax.sgd(0.5))))


def test_each_optimizer_may_have_its_own_rules():
    wrappers = build_optim_wrapper(
        PARAMS, dict(gen=sgd(0.1, paramwise_cfg=dict(custom_keys={"gen.b": dict(lr_mult=2.0)})), disc=sgd(0.5))
    )
    assert wrappers["gen"].param_settings["gen.b"]["lr"] == pytest.approx(0.2)
    assert wrappers["gen"].param_settings["gen.w"]["lr"] == pytest.approx(0.1)
    updates, _ = wrappers["gen"].update(
        optax.tree.ones_like(PARAMS), wrappers.init(PARAMS)["gen"], PARAMS, wrappers.hyperparams["gen"]
    )
    assert float(updates["gen"]["b"]) == pytest.approx(-0.2)
    assert float(updates["shared"]["e"]) == 0.0


@pytest.mark.parametrize(
    ("cfg", "words", "path"),
    [
        (dict(gne=sgd(0.1)), ["`modules`", "got 'gne'", "closest: gen"], "optim_wrapper.gne"),
        (
            dict(gen=sgd(0.1), disc=sgd(1.0, modules=["disc", "gen.w"])),
            ["'gen.w'", "got 'gen' and 'disc'"],
            "optim_wrapper.disc",
        ),
        (dict(gen=dict(optimizer=dict(type="SGD", lr=-1.0))), ["lr"], "optim_wrapper.gen.optimizer"),
    ],
)
def test_errors_have_the_config_path(cfg, words, path):
    check_refusal(lambda: build_optim_wrapper(PARAMS, cfg), ValueError, *words, f"`{path}`")
