"""The numbers of several iterations at once are those of each."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.optim import SGD, Adam, OptimWrapper, OptimWrapperDict


def params(groups):
    return {f"w{i:02}": jnp.ones(2) for i in range(groups)}


def wrapper_of(groups, accumulative_counts=1, optimizer=None):
    optimizer = optimizer or SGD(lr=0.1, momentum=0.9)
    if groups > 1:
        optimizer = optimizer.with_groups(
            [{"params": name, "lr": 0.1 * (i + 1)} for i, name in enumerate(params(groups))]
        )
    wrapper = OptimWrapper(optimizer, accumulative_counts=accumulative_counts)
    wrapper.init(params(groups))
    return wrapper


def several():
    return OptimWrapperDict(one=wrapper_of(1), two=wrapper_of(2))


def groups_of(wrapper):
    wrappers = wrapper.values() if isinstance(wrapper, OptimWrapperDict) else [wrapper]
    return [group for each in wrappers for group in each.param_groups]


def scheduled(wrapper, iterations=5):
    """What each iteration takes, and what all take together."""
    each, settings = [], []
    for i in range(iterations):
        for group in groups_of(wrapper):
            group["lr"] *= 0.7 + i
        wrapper.advance()
        each.append(wrapper.hyperparams)
        settings.append(wrapper.settings())
    return each, wrapper.hyperparams_of(settings)


@pytest.mark.parametrize(
    "make",
    [
        lambda: wrapper_of(1),
        lambda: wrapper_of(1, optimizer=Adam(lr=0.1, betas=(0.9, 0.999))),
        lambda: wrapper_of(3),
        lambda: wrapper_of(70),
        lambda: wrapper_of(2, accumulative_counts=3),
        several,
    ],
    ids=["one group", "betas", "groups", "many groups", "accumulation", "several wrappers"],
)
def test_they_are_those_of_each(make):
    each, together = scheduled(make())
    assert jax.tree.structure(together) == jax.tree.structure(each[0])
    for row, numbers in enumerate(each):
        for found, expected in zip(jax.tree.leaves(together), jax.tree.leaves(numbers), strict=True):
            assert (found.dtype, found.shape[1:]) == (expected.dtype, expected.shape)
            np.testing.assert_array_equal(found[row], expected)


def test_a_number_that_groups_shared_is_one_for_each_once_they_differ():
    wrapper = wrapper_of(2)
    settings = [wrapper.settings()]
    assert wrapper.hyperparams_of(settings)["momentum"].shape == (1, 1)
    wrapper.param_groups[1]["momentum"] = 0.5
    settings.append(wrapper.settings())
    np.testing.assert_array_equal(wrapper.hyperparams_of(settings)["momentum"], np.float32([[0.9, 0.9], [0.9, 0.5]]))


def test_a_wrapper_with_numbers_of_its_own_says_them_both_ways():
    with pytest.raises(TypeError, match="Own overrides `hyperparams`, so it must override `settings` and"):

        class Own(OptimWrapper):
            @property
            def hyperparams(self):
                return {}

    class Both(OptimWrapper):
        @property
        def hyperparams(self):
            return {}

        def settings(self):
            return None

        def hyperparams_of(self, settings):
            return {}

    assert Both(SGD(lr=0.1)).hyperparams == {}
