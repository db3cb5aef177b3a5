"""Test a run from the config to the first step."""

import contextlib

import jax
import numpy as np

from jengine.hooks import Hook
from jengine.runner import programs


def test_a_hook_can_read_the_state_before_the_first_step(make_runner):
    class Reads(Hook):
        def before_train(self, runner):
            self.step, self.params = int(runner.state.step), jax.tree.map(np.asarray, runner.state.params)

    reads = Reads()
    runner = make_runner(custom_hooks=[reads])
    runner.train()
    assert reads.step == 0
    params, _ = runner.model.init(jax.random.fold_in(jax.random.key(runner.seed), 0), None)
    jax.tree.map(np.testing.assert_array_equal, reads.params, params)


def test_a_run_without_jit_has_the_same_result(make_runner):
    compiled = make_runner().train().params
    with jax.disable_jit():
        found = make_runner().train().params
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, compiled)


def test_thread_local_settings_of_jax_apply_to_the_state(make_runner):
    with jax.enable_x64(True):
        params = make_runner().train().params
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float64)}


def test_only_the_first_call_of_each_step_can_be_reported_as_compiling(make_runner, monkeypatch):
    names = []

    def report_if_slow(name):
        names.append(name)
        return contextlib.nullcontext()

    monkeypatch.setattr(programs, "report_if_slow", report_if_slow)
    make_runner().train()
    assert names == ["compiling the training step", "compiling the step of the validation"]
