import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.imix import AutogradProfilerHook, HookBase
from jengine.model import FunctionalModel


def make_nan_model():
    """Return a model whose loss is 0/0 if x is 0."""
    return FunctionalModel(
        init=lambda: {"w": jnp.ones(())}, loss=lambda params, batch: jnp.divide(batch["x"], batch["x"]) * params["w"]
    )


class RecordDebugNans(HookBase):
    def __init__(self):
        self.seen = []

    def before_train_iter(self):
        self.seen.append(jax.config.jax_debug_nans)


@pytest.fixture
def make_nan_run(imix_runner):
    """Create a run of four samples, the third of which produces a NaN."""

    def make(**hook):
        recorder = RecordDebugNans()
        samples = ArrayDataset({"x": np.array([1, 1, 0, 1], np.float32)})
        sampler = dict(type="DefaultSampler", shuffle=False)
        runner = imix_runner(
            model=make_nan_model(),
            max_iter=4,
            train_data=dict(samples_per_gpu=1, data=samples, sampler=sampler),
            custom_hooks=[dict(type="AutogradAnomalyDetectHook", **hook), recorder],
        )
        return runner, recorder

    return make


def test_a_nan_ends_training_and_the_setting_is_restored(make_nan_run):
    runner, recorder = make_nan_run(mode=True)
    with pytest.raises(FloatingPointError, match="invalid value \\(nan\\) encountered"):
        runner.train()
    assert runner.iter == 2  # the third sample
    assert recorder.seen == [True] * 3
    assert jax.config.jax_debug_nans is False


def test_mode_false_disables_the_checks_during_training(make_nan_run):
    jax.config.update("jax_debug_nans", True)
    try:
        runner, recorder = make_nan_run()
        with pytest.raises(FloatingPointError, match="the loss of iteration 2, counted from 0, is nan"):  # at the end
            runner.train()
        assert recorder.seen == [False] * 4
        assert jax.config.jax_debug_nans is True
    finally:
        jax.config.update("jax_debug_nans", False)


def test_infinities_can_be_checked(trainer):
    from jengine.extras.imix import AutogradAnomalyDetectHook

    hook = AutogradAnomalyDetectHook(mode=True, infs=True)
    hook.before_train(trainer)
    assert jax.config.jax_debug_infs is True
    hook.after_train(trainer)
    hook.after_train(trainer)  # a second call has no effect
    assert jax.config.jax_debug_infs is False


def test_only_the_selected_iterations_are_traced(imix_runner, tmp_path):
    hook = AutogradProfilerHook(lambda trainer: trainer.iter in (2, 3), tmp_path / "traces")
    imix_runner(10, custom_hooks=[hook]).train()
    names = sorted(path.name for path in (tmp_path / "traces").iterdir())
    assert names == ["profiler-trace-iter2", "profiler-trace-iter3"]
    for name in names:
        assert list((tmp_path / "traces" / name).rglob("*.xplane.pb"))
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


def test_an_error_stops_the_current_trace(imix_runner, tmp_path):
    class Fails(HookBase):
        def before_train_iter(self):
            raise ArithmeticError("no more")

    hook = AutogradProfilerHook(lambda trainer: True, tmp_path / "traces")
    with pytest.raises(ArithmeticError):
        imix_runner(4, custom_hooks=[hook, Fails()]).train()
    assert [path.name for path in (tmp_path / "traces").iterdir()] == ["profiler-trace-iter0"]
    with pytest.raises(RuntimeError, match="No profile started"):
        jax.profiler.stop_trace()


def test_nans_are_found_after_an_operation_that_disables_the_checks(make_nan_run):
    jax.jit(jax.scipy.special.logsumexp)(np.ones(3, np.float32))  # its trace overrides the global setting
    runner, _ = make_nan_run(mode=True)
    with pytest.raises(FloatingPointError):
        runner.train()
    assert runner.iter == 2
