import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import HOOKS
from jengine.data import ArrayDataset
from jengine.extras.selfsup import DenseCLHook, dense_match, densecl_losses, info_nce, push
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner


def make_model(**attributes):
    """Return a model with a loss of 2 for the image and 4 for its positions, for any value of its parameter."""

    def loss(params, batch, hyperparams):
        zero = 0 * params["w"]
        return densecl_losses(2.0 + zero, 4.0 + zero, hyperparams["loss_lambda"])

    model = FunctionalModel(init=lambda: {"w": jnp.zeros(())}, loss=loss)
    for name, value in attributes.items():
        setattr(model, name, value)
    return model


class Recorder(Hook):
    """Record the losses and `loss_lambda` at some iterations."""

    priority = "LOWEST"

    def __init__(self, iters):
        self.iters = iters
        self.records = {}

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter in self.iters:
            values = runner.hyperparams["loss_lambda"], outputs["loss_single"], outputs["loss_dense"]
            self.records[runner.iter] = tuple(map(float, values))


def make_runner(tmp_path, model, hooks, train_cfg=None, **changes):
    data = dict(batch_size=2, dataset=ArrayDataset(dict(x=np.zeros((4, 1), np.float32))))
    length = train_cfg or dict(by_epoch=False, max_iters=502)
    return build_runner(tmp_path, model, train_dataloader=data, train_cfg=length, custom_hooks=hooks, **changes)


def test_the_dense_loss_starts_at_its_iteration_without_recompilation(tmp_path):
    recorder = Recorder({0, 499, 500, 501})
    model = make_model(loss_lambda=0.5)
    runner = make_runner(tmp_path, model, [dict(type="DenseCLHook", start_iters=500), recorder])
    runner.train()
    off, on = (0.0, 2.0, 0.0), (0.5, 1.0, 2.0)  # lambda, 2 * (1 - lambda), 4 * lambda
    assert recorder.records == {0: off, 499: off, 500: on, 501: on}
    assert runner.programs.update.traces == 1


def test_after_a_resume_loss_lambda_is_that_of_the_model_and_not_the_saved_one(tmp_path):
    recorder = Recorder({0, 1, 2, 3})
    default_hooks = dict(checkpoint=dict(type="CheckpointHook", by_epoch=False, interval=1), logger=None)
    hook = dict(type="DenseCLHook", start_iters=2)
    for end in (1, 4):  # the first run ends and saves with loss_lambda at 0
        train_cfg = dict(by_epoch=False, max_iters=end)
        model = make_model(loss_lambda=0.25)
        make_runner(
            tmp_path, model, [hook, recorder], train_cfg=train_cfg, default_hooks=default_hooks, resume=True
        ).train()
    assert [recorder.records[i][0] for i in range(4)] == [0.0, 0.0, 0.25, 0.25]


def test_a_model_without_loss_lambda_is_rejected_before_the_first_iteration(tmp_path):
    runner = make_runner(tmp_path, make_model(), [DenseCLHook()])
    with pytest.raises(AssertionError, match="DenseCLHook: .* attribute 'loss_lambda', got FunctionalModel without it"):
        runner.train()
    assert runner.iter == 0


def test_loss_lambda_is_found_under_a_precision_policy(tmp_path):
    recorder = Recorder({1})
    runner = make_runner(
        tmp_path,
        make_model(loss_lambda=0.5),
        [DenseCLHook(start_iters=0), recorder],
        precision="bfloat16",
        train_cfg=dict(by_epoch=False, max_iters=2),
    )
    runner.train()
    assert recorder.records[1][0] == 0.5


def test_it_starts_after_a_thousand_iterations_by_default():
    hook = HOOKS.build(dict(type="DenseCLHook"))
    assert hook.start_iters == 1000
    assert hook.get_triggered_stages() == ["before_train", "before_train_iter"]


@pytest.mark.parametrize(("loss_lambda", "single", "dense"), [(0.5, 1, 2), (0.0, 2, 0)])
def test_the_losses_are_weighted_by_loss_lambda(loss_lambda, single, dense):
    losses = densecl_losses(jnp.float32(2), jnp.float32(4), jnp.float32(loss_lambda))
    assert {name: float(value) for name, value in losses.items()} == {"loss_single": single, "loss_dense": dense}


def test_info_nce_is_the_cross_entropy_of_the_positive():
    query, positive = jnp.array([[1.0, 0.0]]), jnp.array([[0.0, 1.0]])
    negatives = jnp.array([[1.0, 0.0], [-1.0, 0.0]])
    # logits 0, 5, -5 at temperature 0.2
    expected = np.log(np.exp(0) + np.exp(5) + np.exp(-5)) - 0
    np.testing.assert_allclose(info_nce(query, positive, negatives), [expected], rtol=1e-6)


def test_positions_are_matched_by_the_direction_of_their_features():
    features = jnp.array([[[1.0, 0.0], [0.0, 1.0]]])
    key_features = jnp.array([[[0.0, 9.0], [2.0, 0.0]]])  # in reverse order, and of other norms
    keys = jnp.array([[[1.0], [2.0]]])
    np.testing.assert_array_equal(dense_match(features, key_features, keys), [[[2.0], [1.0]]])


def test_a_queue_adds_embeddings_at_the_front_and_drops_the_oldest():
    queue = jnp.arange(4.0)[:, None]
    np.testing.assert_array_equal(push(queue, jnp.array([[8.0], [9.0]]))[:, 0], [8, 9, 0, 1])
