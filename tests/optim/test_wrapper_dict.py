"""Several named optimizer wrappers."""

import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.optim import SGD, OptimWrapper, OptimWrapperDict
from tests.refusals import check_refusal

PARAMS = {"generator": {"w": jnp.ones(2)}, "discriminator": {"w": jnp.ones(2)}}


def make(**disc):
    return OptimWrapperDict(
        gen=OptimWrapper(SGD(lr=0.01).with_groups([{"params": "generator"}])),
        disc=OptimWrapper(SGD(lr=0.01).with_groups([{"params": "discriminator"}]), **disc),
    )


def test_it_is_a_mapping():
    wrappers = make()
    assert (len(wrappers), list(wrappers), "gen" in wrappers, "foo" in wrappers) == (2, ["gen", "disc"], True, False)
    assert [name for name, _ in wrappers.items()] == ["gen", "disc"]
    assert wrappers["gen"] is wrappers.get("gen")
    with pytest.raises(KeyError, match="dics"):
        _ = wrappers["dics"]


def test_values_have_the_name_of_the_wrapper():
    wrappers = make()
    assert wrappers.get_lr() == {"gen.lr": [0.01], "disc.lr": [0.01]}
    assert wrappers.get_momentum() == {"gen.momentum": [0], "disc.momentum": [0]}
    groups = [{"params": "generator"}, {"params": "discriminator", "lr": 0.1}]
    wrappers = OptimWrapperDict(all=OptimWrapper(SGD(lr=0.01).with_groups(groups)))
    assert wrappers.get_lr() == {"all.base_lr": [0.01], "all.lr": [0.01, 0.1]}
    wrappers.init(PARAMS)
    assert [row[0] for row in wrappers.group_table()[1]] == ["all.0", "all.1"]
    assert list(wrappers.hyperparams) == list(wrappers.param_groups) == ["all"]


@pytest.mark.parametrize("method", ["update_params", "backward", "step", "optim_context"])
def test_methods_of_a_single_wrapper_are_not_available(method):
    check_refusal(lambda: getattr(make(), method)(None), AttributeError, method)


def test_each_wrapper_updates_its_own_parameters():
    wrappers = make()
    states = wrappers.init(PARAMS)
    updates, _ = wrappers["disc"].update(PARAMS, states["disc"], PARAMS)
    assert not updates["generator"]["w"].any()
    np.testing.assert_allclose(updates["discriminator"]["w"], -0.01)


def test_state_dict_is_nested_by_name():
    wrappers = make(accumulative_counts=2)
    states = wrappers.init(PARAMS)
    wrappers["gen"].param_groups[0]["lr"] = 0.5
    saved = wrappers.state_dict(states)
    other = make(accumulative_counts=2)
    loaded = other.load_state_dict(saved, other.init(PARAMS))
    assert (list(loaded), other.get_lr()["gen.lr"]) == (["gen", "disc"], [0.5])
    other.load_group_state_dict(make().group_state_dict())
    assert other.get_lr()["gen.lr"] == [0.01]
    with pytest.raises(KeyError, match="dics"):
        other.load_state_dict({"dics": {}}, states)


def test_zero_grad_clears_every_wrapper():
    wrappers = OptimWrapperDict(
        a=OptimWrapper(SGD(), accumulative_counts=2), b=OptimWrapper(SGD(), accumulative_counts=2)
    )
    states = wrappers.init(PARAMS)
    states = {name: wrappers[name].accumulate(PARAMS, state) for name, state in states.items()}
    assert [int(optax.tree.get(state, "num_accumulated")) for state in states.values()] == [1, 1]
    assert [int(optax.tree.get(state, "num_accumulated")) for state in wrappers.zero_grad(states).values()] == [0, 0]
