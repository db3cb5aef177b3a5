"""What hooks refuse: a call, its error, and the words that must be in the message."""

import types

import pytest

from jengine.config.errors import ArgumentError, ConfigError
from jengine.hooks import CheckpointHook, EMAHook, Hook, ParamSchedulerHook
from jengine.hooks.hook_list import HookList
from jengine.optim import OptimWrapper
from tests.refusals import check_row
from tests.runner_fixture import QuickRunner


class Broken(Hook):
    """Fail after an iteration."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        {}["missing"]


def runner_at(**changes):
    """Return what hooks read from a run: three epochs of four iterations."""
    state = dict(iter=7, epoch=1, max_iters=12, max_epochs=3, optim_wrapper=OptimWrapper(dict(type="SGD", lr=1.0)))
    loop = types.SimpleNamespace(dataloader=range(4), epoch_length=4)
    return types.SimpleNamespace(**state | dict(train_loop=loop) | changes)


def average(**settings):
    EMAHook(**settings).before_train(runner_at())


def save_best(path, metrics, **settings):
    QuickRunner(path / "run", [CheckpointHook(**settings)], epochs=1, validations=[metrics]).train()


def step_schedulers(schedulers):
    ParamSchedulerHook().after_train_iter(runner_at(param_schedulers=schedulers), batch_idx=0)


LATE_AVERAGE = (ValueError, "`EMAHook.interval`", "first")
REFUSED = {
    "a misspelled priority": (lambda: HookList().register(dict(type="LoggerHook", priorty=3)), TypeError, "'priorty'", "did you mean 'priority'?"),
    "a number as a hook": (lambda: HookList().register(3), TypeError, "Hook", "config dict", "got 3"),
    "a misspelt stage": (lambda: HookList([Hook()]).call("before_trian", runner_at()), ConfigError, "`Hook.stages`", "'before_trian'", "did you mean 'before_train'"),
    "an error in a hook": (lambda: HookList([Broken()]).call("after_train_iter", runner_at(), batch_idx=3), KeyError, "missing", "in Broken.after_train_iter at iteration 7 (epoch 1)"),
    "schedulers in a text": (lambda: step_schedulers("cosine"), TypeError, "got str"),
    # averages
    "an average that begins after the last iteration": (lambda: average(begin_iter=13), AssertionError, "begin_iter", "max_iters=12", "got 13"),
    "an average that begins after the last epoch": (lambda: average(begin_epoch=4), AssertionError, "begin_epoch", "max_epochs=3", "got 4"),
    "an average less often than the run": (lambda: average(interval=12), *LATE_AVERAGE),
    "an average less often than the run from an iteration": (lambda: average(interval=8, begin_iter=5), *LATE_AVERAGE),
    "an average less often than the run from an epoch": (lambda: average(interval=4, begin_epoch=3), *LATE_AVERAGE),
    # checkpoints
    **{
        f"an interval of {interval!r}": (lambda interval=interval: CheckpointHook(interval=interval), ArgumentError, "`CheckpointHook.interval`", "'90s'", "'15m'", "'2h'", "'23:50")
        for interval in ("15", "15 min", "0s", "1:60:00", "")
    },
    "the best of an unknown metric": (lambda tmp_path: save_best(tmp_path, {"acc": 0.5}, save_best="top-1"), KeyError, "'top-1'", "acc"),
    "the best of a metric without a rule": (lambda tmp_path: save_best(tmp_path, {"score": 0.5}, save_best="auto"), ValueError, "'score'", "rule='greater'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_hooks_cannot_do_is_refused(row, request):
    check_row(request, *row)


def test_the_last_legal_settings_of_an_average_are_taken():
    for settings in (dict(begin_iter=12), dict(begin_epoch=3), dict(interval=11)):
        average(**settings)
    EMAHook(interval=100).before_train(runner_at(max_iters=1))  # the average is the weights after the iteration
