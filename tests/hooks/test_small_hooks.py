import types

import pytest

from jengine.hooks import DistSamplerSeedHook, ParamSchedulerHook
from jengine.registry import HOOKS


class Scheduler:
    def __init__(self, by_epoch, need_val_args=False):
        self.by_epoch, self.need_val_args, self.calls = by_epoch, need_val_args, []

    def step(self, *args):
        self.calls.append(args)


def one_run(runner, epochs=2, iters=4):
    hook = ParamSchedulerHook()
    for _ in range(epochs):
        for i in range(iters):
            hook.after_train_iter(runner, batch_idx=i)
        hook.after_train_epoch(runner)
        hook.after_val_epoch(runner, metrics={"loss": 1.0})


def test_schedulers_step_by_their_unit_and_get_the_metrics(fake_runner):
    by_epoch, by_iter, plateau = Scheduler(True), Scheduler(False), Scheduler(True, need_val_args=True)
    fake_runner.param_schedulers = [by_epoch, by_iter, plateau]
    one_run(fake_runner)
    assert by_epoch.calls == [()] * 2
    assert by_iter.calls == [()] * 8
    assert plateau.calls == [(), ({"loss": 1.0},)] * 2  # the epochs are counted, the metrics are weighed


def test_schedulers_of_several_optimizers_come_as_a_dict(fake_runner):
    fake_runner.param_schedulers = dict(gen=[Scheduler(False)], disc=[Scheduler(False), Scheduler(True)])
    one_run(fake_runner)
    assert [len(s.calls) for of_one in fake_runner.param_schedulers.values() for s in of_one] == [8, 8, 2]


def test_no_scheduler_is_no_work_and_anything_else_a_type_error(fake_runner):
    one_run(fake_runner)
    fake_runner.param_schedulers = "cosine"
    with pytest.raises(TypeError, match="got str"):
        ParamSchedulerHook().after_train_iter(fake_runner, batch_idx=0)


def loader_of(epochs, where):
    owner = types.SimpleNamespace(set_epoch=epochs.append)
    if where == "loader":
        return owner
    if where == "sampler":
        return types.SimpleNamespace(sampler=owner)
    return types.SimpleNamespace(sampler=object(), batch_sampler=types.SimpleNamespace(sampler=owner))


@pytest.mark.parametrize("where", ["loader", "sampler", "batch_sampler"])
def test_the_epoch_reaches_the_sampler(fake_runner, where):
    epochs = []
    fake_runner.train_loop.dataloader = loader_of(epochs, where)
    fake_runner.epoch = 3
    DistSamplerSeedHook().before_train_epoch(fake_runner)
    assert epochs == [3]


def test_data_without_a_sampler_are_left_alone(fake_runner):
    DistSamplerSeedHook().before_train_epoch(fake_runner)


@pytest.mark.parametrize(
    ("name", "priority"),
    [
        ("RuntimeInfoHook", "VERY_HIGH"), ("IterTimerHook", "NORMAL"), ("DistSamplerSeedHook", "NORMAL"),
        ("LoggerHook", "BELOW_NORMAL"), ("ParamSchedulerHook", "LOW"), ("CheckpointHook", "VERY_LOW"),
    ],
)  # fmt: skip
def test_the_default_hooks_have_mmengines_priorities(name, priority):
    assert HOOKS.get(name).priority == priority
