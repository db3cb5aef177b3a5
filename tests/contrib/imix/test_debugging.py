import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.contrib.imix import AutogradProfilerHook, HookBase
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel


def nan_model():
    """Its loss is 0/0 where x is 0."""
    return FunctionalModel(
        init=lambda: {"w": jnp.ones(())}, loss=lambda params, batch: jnp.divide(batch["x"], batch["x"]) * params["w"]
    )


class Flag(HookBase):
    def __init__(self):
        self.seen = []

    def before_train_iter(self):
        self.seen.append(jax.config.jax_debug_nans)


@pytest.fixture
def runner_of_nans(imix_runner):
    """Makes a run of four samples, the third of which gives a NaN."""

    def make(**hook):
        flag = Flag()
        samples = ArrayDataset({"x": np.array([1, 1, 0, 1], np.float32)})
        in_order = dict(type="DefaultSampler", shuffle=False)
        runner = imix_runner(
            model=nan_model(),
            max_iter=4,
            train_data=dict(samples_per_gpu=1, data=samples, sampler=in_order),
            custom_hooks=[dict(type="AutogradAnomalyDetectHook", **hook), flag],
        )
        return runner, flag

    return make


def test_the_step_that_makes_a_nan_ends_training_and_the_flag_is_as_before(runner_of_nans):
    runner, flag = runner_of_nans(mode=True)
    with pytest.raises(FloatingPointError, match="invalid value \\(nan\\) encountered"):
        runner.train()
    assert runner.iter == 2  # the third sample
    assert flag.seen == [True] * 3
    assert jax.config.jax_debug_nans is False


def test_without_it_training_goes_on_and_a_search_that_was_on_is_off_meanwhile(runner_of_nans):
    jax.config.update("jax_debug_nans", True)
    try:
        runner, flag = runner_of_nans()
        runner.train()
        assert flag.seen == [False] * 4
        assert jax.config.jax_debug_nans is True
    finally:
        jax.config.update("jax_debug_nans", False)


def test_infinities_are_searched_for_on_demand(trainer):
    from jengine.contrib.imix import AutogradAnomalyDetectHook

    hook = AutogradAnomalyDetectHook(mode=True, infs=True)
    hook.before_train(trainer)
    assert jax.config.jax_debug_infs is True
    hook.after_train(trainer)
    hook.after_train(trainer)  # nothing is left to put back
    assert jax.config.jax_debug_infs is False


def test_the_iterations_asked_for_are_traced_and_no_others(imix_runner, tmp_path):
    hook = AutogradProfilerHook(lambda trainer: trainer.iter in (2, 3), tmp_path / "traces")
    imix_runner(10, custom_hooks=[hook]).train()
    found = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert found == ["profiler-trace-iter2", "profiler-trace-iter3"]
    for name in found:
        assert list((tmp_path / "traces" / name).rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


def test_an_error_ends_a_trace_that_is_under_way(imix_runner, tmp_path):
    class Fails(HookBase):
        def before_train_iter(self):
            raise ArithmeticError("no more")

    hook = AutogradProfilerHook(lambda trainer: True, tmp_path / "traces")
    with pytest.raises(ArithmeticError):
        imix_runner(4, custom_hooks=[hook, Fails()]).train()
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


def test_the_predicate_is_a_function():
    with pytest.raises(TypeError, match="enable_predicate` must be a function, got True"):
        AutogradProfilerHook(True, "traces", use_cuda=False)


def test_the_search_works_after_an_operation_that_suspends_it_for_itself(runner_of_nans):
    jax.jit(jax.scipy.special.logsumexp)(np.ones(3, np.float32))  # its trace leaves the thread without a global search
    runner, _ = runner_of_nans(mode=True)
    with pytest.raises(FloatingPointError):
        runner.train()
    assert runner.iter == 2
