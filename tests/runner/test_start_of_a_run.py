"""From the config to the first step: the state is made in the background, and the step is traced meanwhile."""

import jax
import numpy as np
import pytest

from jengine.hooks import Hook
from jengine.parallel import Coming


def test_the_step_is_traced_while_the_state_is_made_and_once_in_all(make_runner, monkeypatch):
    seen = []
    waited = Coming.whole

    def whole(coming):
        seen.append(runner.programs.update.traces)
        return waited(coming)

    monkeypatch.setattr(Coming, "whole", whole)
    runner = make_runner(train_cfg=dict(by_epoch=True, max_epochs=2, on_recompile="raise"))
    state = runner.train().params
    assert (seen, runner.programs.update.traces) == ([1], 1)

    at_once = make_runner()
    at_once.prepare_training()
    jax.block_until_ready(at_once.state)
    jax.tree.map(np.testing.assert_array_equal, state, at_once.train().params)


def test_a_hook_may_read_the_state_before_it_was_stepped(make_runner):
    class Reads(Hook):
        def before_train(self, runner):
            self.step, self.params = int(runner.state.step), jax.tree.map(np.asarray, runner.state.params)

    reads = Reads()
    runner = make_runner(custom_hooks=[reads])
    runner.train()
    assert reads.step == 0
    params, _ = runner.model.init(jax.random.fold_in(jax.random.key(runner.seed), 0), None)
    jax.tree.map(np.testing.assert_array_equal, reads.params, params)


def test_a_state_that_cannot_be_made_ends_the_run_with_the_reason(make_runner, monkeypatch):
    def fail(coming):
        raise MemoryError("no room for the state")

    monkeypatch.setattr(Coming, "whole", fail)
    with pytest.raises(MemoryError, match="no room for the state"):
        make_runner().train()


def test_a_run_without_jit_comes_to_the_same(make_runner):
    compiled = make_runner().train().params
    with jax.disable_jit():
        found = make_runner().train().params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, compiled)


def test_settings_of_jax_that_hold_in_a_thread_hold_for_the_state(make_runner):
    with jax.enable_x64(True):
        params = make_runner().train().params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float64)}
