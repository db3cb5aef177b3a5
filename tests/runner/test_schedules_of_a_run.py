"""Test the rates of resumed runs: each subset of saved parts, schedules, lengths and hyperparameters; and set values."""

import contextlib

import numpy as np
import optax
import pytest

from jengine.hooks import Hook

ITERS, EPOCH = 16, 4
NAMES = ("lr", "momentum", "weight_decay")


class Recorder(Hook):
    """Record the hyperparameters of each iteration, change some, and end the run like a kill."""

    def __init__(self, change=None):
        self.rates = {}
        self.change = change

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if self.change is not None:
            self.change(runner)
        group = runner.optim_wrapper.param_groups[0]
        self.rates[runner.iter] = tuple(group[name] for name in NAMES)


class Stop(Hook):
    def __init__(self, at):
        self.at = at

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.at:
            raise KeyboardInterrupt


SGD = dict(optimizer=dict(type="SGD", lr=0.1, momentum=0.9, weight_decay=0.01))
SCHEDULES = {
    "none": None,
    "iterations": [
        dict(type="LinearLR", start_factor=0.0, by_epoch=False, end=5),
        dict(type="CosineAnnealingLR", eta_min=0.01, begin=5, by_epoch=False),
        dict(type="LinearMomentum", start_factor=0.5, by_epoch=False, end=10),
        dict(type="CosineAnnealingWeightDecay", eta_min=0.1, by_epoch=False),
    ],
    "epochs": [
        dict(type="ConstantLR", factor=0.0, end=2),
        dict(type="PolyLR", eta_min=0.01),
        dict(type="ExponentialMomentum", gamma=0.9, by_epoch=False),
        dict(type="CosineAnnealingParamScheduler", param_name="weight_decay", eta_min=0.001),
    ],
    "converted": [
        dict(type="OneCycleLR", eta_max=0.5, convert_to_iter_based=True),
        dict(type="StepMomentum", step_size=1, gamma=0.9, convert_to_iter_based=True),
    ],
    "optax": optax.warmup_cosine_decay_schedule(0.0, 0.1, 4, ITERS),
}


@pytest.fixture
def run(make_runner):
    def run(work_dir, schedules, epochs=ITERS // EPOCH, stop=None, resume=False, change=None, save=None, **changes):
        checkpoint = dict(type="CheckpointHook", by_epoch=False, interval=9, **(save or {}))
        recorder = Recorder(change)
        runner = make_runner(
            work_dir=work_dir, optim_wrapper=SGD, param_scheduler=schedules, train_cfg=dict(max_epochs=epochs),
            default_hooks=dict(checkpoint=checkpoint, logger=None), resume=resume, custom_hooks=[recorder, *([] if stop is None else [Stop(stop)])], **changes,
        )  # fmt: skip
        with contextlib.suppress(KeyboardInterrupt):
            runner.train()
        return recorder.rates, runner

    return run


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_rates_after_a_resume(run, tmp_path, name):
    schedules = SCHEDULES[name]
    whole = {epochs: run(tmp_path / f"{epochs} epochs", schedules, epochs)[0] for epochs in (4, 6)}
    # what the checkpoint has, the optimizer and the schedules, and the lengths with which it is resumed
    for saved, lengths in [((True, True), (4, 6)), ((False, False), (4, 6)), ((True, False), (6,)), ((False, True), (4,))]:
        save = dict(zip(("save_optimizer", "save_param_scheduler"), saved, strict=True))
        run(tmp_path / f"{saved}", schedules, stop=11, save=save)
        for epochs in lengths:
            path = tmp_path / f"{saved}" / "iter_9"
            rates, _ = run(tmp_path / f"{saved}, {epochs}", schedules, epochs, resume=path, save=save)
            assert list(rates) == list(range(9, epochs * EPOCH))
            expected = list(whole[epochs].values())
            if saved[1] or name == "none":
                assert list(rates.values()) == expected[9:]
            elif name in ("iterations", "optax", "converted"):  # the documented other one: from the beginning
                assert list(rates.values()) == expected[: len(rates)]
            else:  # by epoch: the first epoch has only the iterations that were left
                assert [rate[0] for rate in rates.values()][:3] == [expected[0][0]] * 3


def set_rates(runner):
    if runner.iter == 5:
        runner.set_lr(0.02)
        runner.optim_wrapper.param_groups[0]["weight_decay"] = 0.5


class ByName(Hook):
    """Set hyperparameters of the optimizer by their names in the step."""

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 4:
            runner.hyperparams["learning_rate"] = 0.5
            runner.hyperparams["b1"] = 0.25


def test_a_hyperparameter_that_is_set_by_its_name_in_the_step_follows_the_same_rule(make_runner):
    late = Late()
    adam = dict(optimizer=dict(type="Adam", lr=0.1))
    schedule = dict(type="ExponentialLR", gamma=0.5, by_epoch=False)
    runner = make_runner(
        optim_wrapper=adam, param_scheduler=schedule, custom_hooks=[ByName(), late], train_cfg=dict(max_epochs=2)
    )
    runner.train()
    logged, _ = runner.message_hub.get_scalar("train/lr").data
    assert logged[3:].tolist() == [0.5, 0.5, 0.25, 0.125, 0.0625]  # 0.5 is set twice, by `Late` in iteration 3
    assert runner.optim_wrapper.param_groups[0]["betas"] == (0.25, 0.999)
    assert dict(runner.hyperparams) == {}


@pytest.mark.parametrize(
    ("name", "save_optimizer"),
    [("none", True), ("none", False), ("iterations", True), ("iterations", False), ("converted", True), ("optax", True)],
)
def test_values_that_are_set_by_hand_are_kept_by_a_resume(run, tmp_path, name, save_optimizer):
    schedules, save = SCHEDULES[name], dict(save_optimizer=save_optimizer)
    expected, _ = run(tmp_path / "whole", schedules, change=set_rates, save=save)
    assert expected[5][0] == 0.02
    assert expected[5][2] == 0.5
    rates, _ = run(tmp_path / "rest", schedules, resume=tmp_path / "whole" / "iter_9", save=save)
    assert list(rates.values()) == list(expected.values())[9:]


def test_a_rate_without_a_schedule_stays_as_it_was_set(run, tmp_path):
    rates, _ = run(tmp_path, None, change=set_rates)
    assert [rate[0] for rate in rates.values()] == [0.1] * 5 + [0.02] * 11


class Late(Hook):
    """Set the rate after the other hooks of the stage."""

    priority = "VERY_LOW"

    def __init__(self):
        self.used = []

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == 3:
            runner.set_lr(0.5)
        self.used.append(runner.optim_wrapper.param_groups[0]["lr"])


def test_the_logged_rate_is_that_of_the_step_that_used_it(make_runner):
    late = Late()
    runner = make_runner(optim_wrapper=SGD, custom_hooks=[late], param_scheduler=SCHEDULES["iterations"])
    runner.train()
    logged, _ = runner.message_hub.get_scalar("train/lr").data
    np.testing.assert_array_equal(logged, late.used)
