"""Test `Runner.predict` over each kind of data and on each strategy."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset, DataLoader
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from jengine.train import compilation_counter
from tests.refusals import check_refusal

X = np.random.RandomState(1).randn(10, 2).astype(np.float32)


@pytest.fixture
def runner(make_runner):
    """Return a Runner whose weights are (1, 2) and whose bias is 3."""
    runner = make_runner(train_cfg=dict(max_epochs=1))
    state = runner.train()
    runner.state = state.replace(params=dict(w=jnp.array([1.0, 2.0]), b=jnp.array(3.0)))
    return runner


EXPECTED = X @ np.array([1, 2], np.float32) + 3


def batches(*sizes):
    return [dict(x=part) for part in np.split(X, np.cumsum(sizes)[:-1])]


@pytest.mark.parametrize(
    ("make_data", "batch_size"),
    [
        (lambda: dict(x=X), None),
        (lambda: dict(x=X), 4),
        (lambda: dict(x=jnp.asarray(X)), 20),
        (lambda: ArrayDataset(dict(x=X)), None),
        (lambda: ArrayDataset(dict(x=X)), 4),
        (lambda: dict(type="ArrayDataset", arrays=dict(x=X)), 3),
        (lambda: dict(dataset=ArrayDataset(dict(x=X)), batch_size=4), None),
        (lambda: DataLoader(ArrayDataset(dict(x=X)), batch_size=4), None),
        (lambda: DataLoader(ArrayDataset(dict(x=X)), batch_size=5, drop_last=True), None),
        (lambda: batches(4, 4, 2), None),
        (lambda: batches(4, 2, 4), None),
        (lambda: iter(batches(4, 4, 2)), None),
        (lambda: (batch for batch in batches(10)), None),
    ],
)
def test_all_kinds_of_data_give_one_prediction_for_each_example_in_order(runner, make_data, batch_size):
    predictions = runner.predict(make_data(), batch_size)
    assert (type(predictions), predictions.dtype) == (np.ndarray, np.float32)
    np.testing.assert_allclose(predictions, EXPECTED, rtol=1e-6)


@pytest.mark.parametrize(
    "parallel", [dict(type="Pjit", devices=4), dict(type="DataParallel", devices=4)], ids=["pjit", "replicas"]
)
def test_batches_are_padded_to_a_multiple_of_the_devices(make_runner, parallel):
    runner = make_runner(parallel=parallel)
    w, b = (np.asarray(runner.train().params[name]) for name in "wb")
    for data in (dict(x=X), ArrayDataset(dict(x=X)), batches(5, 5), batches(8, 2)):
        np.testing.assert_allclose(runner.predict(data), X @ w + b, rtol=1e-5)
    with pytest.raises(ValueError, match="partitioned 4 times"):
        runner.predict(dict(x=X), batch_size=6)


def test_batches_and_predictions_may_be_any_pytree(make_runner):
    model = FunctionalModel(
        lambda: {"w": jnp.ones(())},
        lambda params: params["w"],
        lambda params, batch: {"sum": batch[0] + batch[1], "parts": [batch[1][:, None]]},
    )
    found = make_runner(model=model).predict((np.arange(5), np.ones(5, np.int32)), batch_size=2)
    np.testing.assert_array_equal(found["sum"], [1, 2, 3, 4, 5])
    assert found["parts"][0].shape == (5, 1)


def test_an_equal_shape_is_compiled_once(runner):
    runner.predict(dict(x=X), batch_size=3)
    compiled = compilation_counter.count
    runner.predict(dict(x=np.tile(X, (10, 1))), batch_size=3)
    assert compilation_counter.count == compiled


@pytest.mark.parametrize("evaluate_on_ema", [True, False])
def test_the_weights_are_those_of_the_validation_also_from_a_checkpoint(make_runner, tmp_path, evaluate_on_ema):
    hook = dict(type="EMAHook", momentum=0.1, evaluate_on_ema=evaluate_on_ema)
    checkpoints = dict(logger=None, checkpoint=dict(type="CheckpointHook", interval=2))
    runner = make_runner(custom_hooks=[hook], default_hooks=checkpoints, validates=True)
    state = runner.train()
    used = state.hook_state["EMAHook"].params if evaluate_on_ema else state.params
    expected = X @ np.asarray(used["w"]) + np.asarray(used["b"])
    np.testing.assert_allclose(runner.predict(dict(x=X)), expected, rtol=1e-6)
    fresh = make_runner(tmp_path / "fresh", custom_hooks=[hook], load_from=runner.work_dir, validates=True)
    np.testing.assert_allclose(fresh.predict(dict(x=X)), expected, rtol=1e-6)
    resumed = make_runner(runner.work_dir, custom_hooks=[hook], resume=True, validates=True)
    np.testing.assert_allclose(resumed.predict(dict(x=X)), expected, rtol=1e-6)


def test_training_is_the_same_with_predictions_in_between(make_runner, tmp_path):
    class Predicts(Hook):
        def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
            self.predictions = runner.predict(dict(x=X))

    expected = make_runner().train()
    hook = Predicts()
    runner = make_runner(tmp_path / "other", custom_hooks=[hook])
    runner.predict(dict(x=X))  # before training, of the initial weights
    state = runner.train()
    jax.tree.map(np.testing.assert_array_equal, state.params, expected.params)
    np.testing.assert_array_equal(hook.predictions, runner.predict(dict(x=X)))


def test_initial_weights_are_reported(make_runner, caplog):
    runner = make_runner()
    with caplog.at_level(logging.WARNING, "jengine"):
        np.testing.assert_array_equal(runner.predict(dict(x=X)), np.zeros(10))
    assert "The model has its initial weights: set load_from" in caplog.text


@pytest.mark.parametrize(
    ("data", "batch_size", "words"),
    [
        (batches(4, 4, 2), 4, ["`batch_size`", "None", "got 4"]),
        (dict(x=X), 0, ["`batch_size`", "at least 1", "None", "got 0"]),
        (batches(4, 6), None, ["got 6 in batch 1"]),
        (dict(x=X[:0]), None, ["`data`", "got none"]),
        ([], None, ["`data`", "got none"]),
        (dict(x=X, y=X[:3]), None, ["leading axis"]),
    ],
)
def test_data_that_cannot_be_predicted_are_refused(make_runner, data, batch_size, words):
    check_refusal(lambda: make_runner().predict(data, batch_size), ValueError, *words)
