import types

import pytest

from jengine.config import HOOKS
from jengine.extras.optimizers.plateau import PlateauSettings
from jengine.hooks import DistSamplerSeedHook, ParamSchedulerHook


class Scheduler:
    def __init__(self, by_epoch, need_val_args=False):
        self.by_epoch, self.need_val_args, self.calls = by_epoch, need_val_args, []
        self.settings = PlateauSettings(monitor="loss")

    def step(self, *args):
        self.calls.append(args)


def run_epochs(runner, epochs=2, iters=4):
    hook = ParamSchedulerHook()
    for _ in range(epochs):
        for i in range(iters):
            hook.after_train_iter(runner, batch_idx=i)
        hook.after_train_epoch(runner)
        hook.after_val_epoch(runner, metrics={"loss": 1.0})


def test_schedulers_step_in_their_unit_and_receive_the_metrics(runner):
    by_epoch, by_iter, plateau = Scheduler(True), Scheduler(False), Scheduler(True, need_val_args=True)
    runner.param_schedulers = [by_epoch, by_iter, plateau]
    run_epochs(runner)
    assert by_epoch.calls == [()] * 2
    assert by_iter.calls == [()] * 8
    assert plateau.calls == [(), ({"loss": 1.0},)] * 2  # by epochs, and with the metrics


def test_schedulers_of_several_optimizers_are_a_dict(runner):
    runner.param_schedulers = dict(gen=[Scheduler(False)], disc=[Scheduler(False), Scheduler(True)])
    run_epochs(runner)
    assert [len(s.calls) for schedulers in runner.param_schedulers.values() for s in schedulers] == [8, 8, 2]


def test_no_scheduler_is_allowed(runner):
    runner.param_schedulers = None
    run_epochs(runner)


def make_loader(epochs, owner_name):
    owner = types.SimpleNamespace(set_epoch=epochs.append)
    if owner_name == "loader":
        return owner
    if owner_name == "sampler":
        return types.SimpleNamespace(sampler=owner)
    return types.SimpleNamespace(sampler=object(), batch_sampler=types.SimpleNamespace(sampler=owner))


@pytest.mark.parametrize("owner_name", ["loader", "sampler", "batch_sampler"])
def test_the_epoch_reaches_the_sampler(runner, owner_name):
    epochs = []
    runner.train_loop.dataloader = make_loader(epochs, owner_name)
    runner.train_loop.epoch = 3
    DistSamplerSeedHook().before_train_epoch(runner)
    assert epochs == [3]


def test_data_without_a_sampler_are_allowed(runner):
    DistSamplerSeedHook().before_train_epoch(runner)


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("RuntimeInfoHook", "VERY_HIGH"), ("IterTimerHook", "NORMAL"), ("DistSamplerSeedHook", "NORMAL"),
        ("LoggerHook", "BELOW_NORMAL"), ("ParamSchedulerHook", "LOW"), ("CheckpointHook", "VERY_LOW"),
    ],
)  # fmt: skip
def test_the_default_hooks_have_mmengines_priorities(name, priority):
    assert HOOKS.get(name).priority == priority
