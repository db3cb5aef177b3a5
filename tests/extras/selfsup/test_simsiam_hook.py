import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.hooks import Hook
from jengine.model import FunctionalModel
from tests.runner.conftest import build_runner

# cosine annealing of 0.05 over 10 epochs, computed by MMEngine
COSINE = [0.05, 0.048776, 0.045225, 0.039695, 0.032725, 0.025, 0.017275, 0.010305, 0.004775, 0.001224]


class RateRecorder(Hook):
    """Record the learning rates of both groups in each iteration."""

    priority = "LOWEST"

    def __init__(self):
        self.encoder, self.predictor = [], []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        rates = {group.paths[0]: group["lr"] for group in runner.optim_wrapper.param_groups}
        self.encoder.append(rates["encoder"])
        self.predictor.append(rates["predictor"])


def train(tmp_path, hook, predictor, **changes):
    rates = RateRecorder()
    arguments = dict(
        train_dataloader=dict(batch_size=2, dataset=ArrayDataset(dict(x=np.ones((2, 1), np.float32)))),
        train_cfg=dict(max_epochs=10),
        optim_wrapper=dict(
            optimizer=dict(type="SGD", lr=0.05), paramwise_cfg=dict(custom_keys={"predictor": predictor})
        ),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=10, by_epoch=True),
        custom_hooks=[dict(type="SimSiamHook", priority="HIGH", **hook), rates],
    )
    model = FunctionalModel(
        init=lambda: {"encoder": jnp.ones(()), "predictor": jnp.ones(())},
        loss=lambda params, batch: jnp.square(params["encoder"] + params["predictor"] * batch["x"]),
    )
    runner = build_runner(tmp_path, model, **{**arguments, **changes})
    runner.train()
    assert runner.programs.update.traces == 1
    return rates


def test_the_predictor_keeps_its_rate_while_the_encoder_follows_the_cosine(tmp_path):
    rates = train(tmp_path, dict(fix_pred_lr=True, lr=0.05), dict(fix_lr=True))
    np.testing.assert_allclose(rates.encoder, COSINE, atol=5e-7)
    assert rates.predictor == [0.05] * 10


def test_the_rate_is_that_of_the_hook_and_not_of_the_optimizer(tmp_path):
    rates = train(tmp_path, dict(fix_pred_lr=True, lr=0.2), dict(fix_lr=True))
    assert rates.predictor == [0.2] * 10


def test_without_fixing_both_groups_follow_the_schedule(tmp_path):
    rates = train(tmp_path, dict(fix_pred_lr=False, lr=0.05), dict(fix_lr=True))
    np.testing.assert_allclose(rates.encoder, COSINE, atol=5e-7)
    assert rates.predictor == rates.encoder


def test_without_fixing_both_groups_follow_a_warm_up(tmp_path):
    param_scheduler = [
        dict(type="LinearLR", start_factor=0.0, by_epoch=True, end=4),
        dict(type="CosineAnnealingLR", T_max=6, by_epoch=True, begin=4, end=10),
    ]
    rates = train(tmp_path, dict(fix_pred_lr=False, lr=0.05), dict(fix_lr=True), param_scheduler=param_scheduler)
    assert rates.predictor == rates.encoder
    assert rates.encoder[0] == 0.0
    np.testing.assert_allclose(rates.encoder[1], 0.05 / 3, rtol=1e-6)  # from 0 to the full rate in three steps


def test_a_schedule_by_iteration_does_not_change_the_predictors_rate_within_an_epoch(tmp_path):
    data = ArrayDataset(dict(x=np.ones((6, 1), np.float32)))
    rates = train(
        tmp_path,
        dict(fix_pred_lr=True, lr=0.05),
        dict(fix_lr=True),
        train_dataloader=dict(batch_size=2, dataset=data),
        train_cfg=dict(max_epochs=2),
        param_scheduler=dict(type="CosineAnnealingLR", T_max=6, by_epoch=False),
    )
    assert rates.predictor == [0.05] * 6
    assert sorted(set(rates.encoder), reverse=True) == rates.encoder


class LrOverride(Hook):
    """Set all learning rates before each iteration."""

    priority = "VERY_HIGH"

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        for group in runner.optim_wrapper.param_groups:
            group["lr"] = 1.0


@pytest.mark.parametrize(("adjust_by_epoch", "rate"), [(True, 1.0), (False, 0.05)])
def test_the_rate_is_set_before_each_iteration_unless_adjust_by_epoch(tmp_path, adjust_by_epoch, rate):
    hook = dict(type="SimSiamHook", priority="HIGH", fix_pred_lr=True, lr=0.05, adjust_by_epoch=adjust_by_epoch)
    rates = RateRecorder()
    train(
        tmp_path,
        dict(fix_pred_lr=True, lr=0.05),
        dict(fix_lr=True),
        train_cfg=dict(max_epochs=1),
        custom_hooks=[LrOverride(), hook, rates],
    )
    assert rates.predictor == [rate]
