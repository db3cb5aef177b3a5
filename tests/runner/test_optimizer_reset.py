"""Test a restart of the optimizer within a run: zero moments and count, the same placement, no new compilation."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from jengine.extras.optimizers.freeze import reset_state
from jengine.hooks import Hook
from jengine.optim import Adam, OptimWrapper


class ResetAt(Hook):
    """Reset the optimizer before some iterations, and record the step count."""

    def __init__(self, at, groups=None):
        self.at, self.groups, self.counts = at, groups, []
        self.shardings = set()

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter in self.at:
            runner.reset_optimizer(self.groups)
        opt_state = runner.state.opt_state
        self.counts.append(int(optax.tree.get(opt_state, "count")))
        self.shardings.add(tuple(leaf.sharding for leaf in jax.tree.leaves(opt_state)))


ADAM = dict(optimizer=dict(type="Adam", lr=0.1))


@pytest.mark.parametrize("parallel", [None, dict(type="Pjit", devices=2), dict(type="DataParallel", devices=2)])
def test_the_optimizer_starts_anew_and_nothing_compiles_again(make_runner, parallel):
    hook = ResetAt(at=(3, 5))
    runner = make_runner(optim_wrapper=ADAM, custom_hooks=[hook], parallel=parallel, train_cfg=dict(max_epochs=2))
    runner.train()
    assert hook.counts == [0, 1, 2, 0, 1, 0, 1, 2]
    assert runner.programs.update.traces == 1
    assert len(hook.shardings) == 1


def test_the_accumulated_gradients_and_the_loss_scale_stay():
    wrapper = OptimWrapper(Adam(lr=0.1), accumulative_counts=3)
    params = {"w": jnp.ones(2)}
    state = wrapper.init(params)
    state = wrapper.update({"w": jnp.ones(2)}, state, params)[1]
    state = wrapper.accumulate({"w": jnp.full(2, 5.0)}, state)
    new = reset_state(wrapper, state, params)
    assert new.inner_state.num_accumulated == state.inner_state.num_accumulated == 1
    np.testing.assert_array_equal(new.inner_state.accumulated_grads["w"], [5.0, 5.0])
    assert optax.tree.get(state, "count") == 1
    assert optax.tree.get(new, "count") == 0
    np.testing.assert_array_equal(optax.tree.get(new, "mu")["w"], [0.0, 0.0])


def test_some_groups_start_anew_and_the_others_and_the_count_stay():
    groups = [dict(params="a"), dict(params="b", lr=0.2)]
    wrapper = OptimWrapper(Adam(lr=0.1).with_groups(groups))
    params = {"a": jnp.ones(2), "b": jnp.ones(2)}
    state = wrapper.init(params)
    state = wrapper.update(params, state, params)[1]
    new = reset_state(wrapper, state, params, groups=[1])
    moments, before = optax.tree.get(new, "mu"), optax.tree.get(state, "mu")
    np.testing.assert_array_equal(moments["a"], before["a"])
    np.testing.assert_array_equal(moments["b"], [0.0, 0.0])
    assert optax.tree.get(new, "count") == 1
