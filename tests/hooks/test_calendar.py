"""When hooks are called at the two stages of a training iteration, and where calls of the step must end."""

import math
import types

import pytest

from jengine.hooks import (
    CheckInvalidLossHook,
    CheckpointHook,
    EmptyCacheHook,
    Hook,
    MemoryProfilerHook,
    NumericsGuardHook,
    PreciseBNHook,
    ProfilerHook,
)
from jengine.hooks.hook_list import HookList

LENGTH, EPOCHS = 10, 4


def runner_at(iteration, by_epoch=True):
    loop = types.SimpleNamespace(dataloader=range(LENGTH), by_epoch=by_epoch, iter=iteration)
    return types.SimpleNamespace(
        iter=iteration, epoch=iteration // LENGTH if by_epoch else 0, max_iters=LENGTH * EPOCHS, max_epochs=EPOCHS,
        train_loop=loop,
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("begin", [0, 2, 5, 20])
def test_the_next_of_every_n_is_the_first_that_is_one(n, begin):
    hook = Hook()
    for start in range(40):
        due = (i for i in range(start, 200) if hook.every_n_train_iters(runner_at(i), n, begin))
        assert hook.next_of_every(n, start, begin) == next(due)
    assert hook.next_of_every(-1, 3) == math.inf


def test_the_next_inner_iteration_counts_from_the_beginning_of_the_epoch():
    hook = Hook()
    assert [hook.next_inner(runner_at(i), 4, i) for i in (10, 13, 14, 17)] == [13, 13, 17, 17]
    assert [hook.next_inner(runner_at(i, by_epoch=False), 4, i) for i in (10, 12, 15)] == [11, 15, 15]


# What the hooks do is asked of their own conditions, iteration by iteration.
WORKS = {
    "checkpoint": (
        CheckpointHook(interval=6, by_epoch=False, save_begin=3),
        lambda i: (i + 1 >= 3 and (i + 1 - 3) % 6 == 0) or i + 1 == LENGTH * EPOCHS,
    ),
    "checkpoint of epochs": (CheckpointHook(interval=1), lambda i: False),
    "invalid loss": (CheckInvalidLossHook(interval=5), lambda i: (i + 1) % 5 == 0),
    "memory": (MemoryProfilerHook(interval=9), lambda i: (i + 1) % 9 == 0),
    "empty cache": (EmptyCacheHook(after_iter=True), lambda i: True),
    "empty cache of epochs": (EmptyCacheHook(), lambda i: False),
    "numerics": (NumericsGuardHook(interval=8), lambda i: (i + 1) % 8 == 0 or i + 1 == LENGTH * EPOCHS),
}


@pytest.mark.parametrize("name", WORKS)
def test_a_hook_is_due_when_it_has_work(name):
    hook, works = WORKS[name]
    for start in range(LENGTH * EPOCHS):
        end = (start // LENGTH + 1) * LENGTH  # beyond it the next epoch asks anew
        due = next((i for i in range(start, end) if works(i)), math.inf)
        said = hook.next_due(runner_at(start), "after_train_iter", start)
        assert said == due or (due == math.inf and said >= end)


def test_precise_statistics_are_due_in_an_iteration_loop_alone():
    hook = PreciseBNHook(num_samples=8, interval=3)
    assert hook.next_due(runner_at(0), "after_train_iter", 0) == math.inf
    assert hook.next_due(runner_at(0, by_epoch=False), "after_train_iter", 0) == 2


def test_a_profiler_is_due_at_what_it_traces():
    hook = ProfilerHook(by_epoch=False, profile_times=3)
    assert [hook.next_due(runner_at(i), "before_train_iter", i) for i in range(5)] == [0, 1, 2, math.inf, math.inf]
    hook = ProfilerHook(by_epoch=False, schedule=dict(wait=2, warmup=1, active=2, repeat=2))
    traced = [3, 3, 3, 3, 4, 8, 8, 8, 8, 9, math.inf, math.inf]
    assert [hook.next_due(runner_at(i), "before_train_iter", i) for i in range(12)] == traced


class Noting(Hook):
    """Notes its calls."""

    def __init__(self, n=None, mode="cut"):
        self.n = n
        self.in_windows = mode
        self.calls = []

    def next_due(self, runner, stage, start):
        return super().next_due(runner, stage, start) if self.n is None else self.next_of_every(self.n, start)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.calls.append(runner.iter)


class Each(Hook):
    """Says nothing of when it acts."""

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        pass


def made(*hooks):
    hook_list = HookList()
    for hook in hooks:
        hook_list.register(hook)
    return hook_list


def test_hooks_are_called_when_due_and_ahead_when_they_may():
    every, third, ahead = Noting(), Noting(3), Noting(4, mode="ahead")
    hooks, runner = made(every, third, ahead), runner_at(0)
    for runner.iter in range(9):
        hooks.call(runner, "after_train_iter", batch_idx=runner.iter)
    assert every.calls == list(range(9))
    assert third.calls == [2, 5, 8]
    assert ahead.calls == list(range(9))
    runner.iter = 9
    hooks.calendar(runner, "after_train_iter").call_ahead(batch_idx=9)
    assert (every.calls[-1], third.calls[-1], ahead.calls[-1]) == (8, 8, 9)


def test_an_epoch_asks_anew_when_hooks_are_due():
    third = Noting(3)
    hooks = made(third)
    hooks.call(runner_at(0), "after_train_iter", batch_idx=0)
    third.n = 1
    hooks.call(runner_at(1), "after_train_iter", batch_idx=1)
    assert third.calls == []
    hooks.call(runner_at(2), "before_train_epoch")
    hooks.call(runner_at(2), "after_train_iter", batch_idx=2)
    assert third.calls == [2]


def test_a_call_of_the_step_ends_at_the_first_hook_that_is_due():
    assert made(Noting(3), Noting(4)).window_end(runner_at(0), 0, 8) == 3
    assert made(Noting(mode="last"), Noting(4)).window_end(runner_at(0), 4, 20) == 8
    assert made(Noting(6, mode="ahead")).window_end(runner_at(0), 0, 20) == 6
    assert made().window_end(runner_at(0), 5, 9) == 9

    class Before(Hook):
        def next_due(self, runner, stage, start):
            return self.next_of_every(5, start)

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            pass

    assert made(Before()).window_end(runner_at(0), 0, 9) == 4  # it begins a call of its own
    assert made(Before()).window_end(runner_at(0), 4, 12) == 9


def test_who_cuts_at_each_iteration_is_named():
    each = Each()
    assert made(each, Noting(2), Noting(mode="last")).cutting_each(runner_at(0)) == [each]
    assert made(Noting(1)).cutting_each(runner_at(0)) != []
