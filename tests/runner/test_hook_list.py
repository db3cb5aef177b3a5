"""Test when hooks are called at the two stages of a training iteration, and which chunks of steps they allow."""

import math
import types

import numpy as np
import pytest

from jengine.extras.diagnose import (
    EmptyCacheHook,
    MemoryProfilerHook,
    NumericsGuardHook,
    ProfilerHook,
)
from jengine.hooks import CheckInvalidLossHook, CheckpointHook, Hook
from jengine.hooks.hook_list import HookList
from jengine.train.scanned_step import ChunkMetrics

LENGTH, EPOCHS = 10, 4


def runner_at(iteration, by_epoch=True):
    loop = types.SimpleNamespace(dataloader=range(LENGTH), by_epoch=by_epoch, iter=iteration)
    return types.SimpleNamespace(
        iter=iteration, epoch=iteration // LENGTH if by_epoch else 0, max_iters=LENGTH * EPOCHS, max_epochs=EPOCHS,
        train_loop=loop,
    )  # fmt: skip


@pytest.mark.parametrize("n", [1, 3, 7])
@pytest.mark.parametrize("begin", [0, 2, 5, 20])
def test_next_multiple_is_the_first_step_that_is_due(n, begin):
    hook = Hook()
    for start in range(40):
        due = (i for i in range(start, 200) if hook.every_n_train_iters(runner_at(i), n, begin))
        assert hook.next_multiple(n, start, begin) == next(due)
    assert hook.next_multiple(-1, 3) == math.inf


# The hooks, and whether each acts after iteration i.
CONDITIONS = {
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


@pytest.mark.parametrize("name", CONDITIONS)
def test_next_step_is_the_next_step_at_which_a_hook_acts(name):
    hook, acts = CONDITIONS[name]
    for start in range(LENGTH * EPOCHS):
        end = (start // LENGTH + 1) * LENGTH
        due = next((i for i in range(start, end) if acts(i)), math.inf)
        returned = hook.next_step(runner_at(start), start)
        assert returned == due or (due == math.inf and returned >= end)


def test_a_profiler_is_due_at_the_steps_that_it_traces():
    hook = ProfilerHook(by_epoch=False, profile_times=3)
    assert [hook.next_step(runner_at(i), i) for i in range(5)] == [0, 1, 2, math.inf, math.inf]
    hook = ProfilerHook(by_epoch=False, schedule=dict(wait=2, warmup=1, active=2, repeat=2))
    traced = [3, 3, 3, 3, 4, 8, 8, 8, 8, 9, math.inf, math.inf]
    assert [hook.next_step(runner_at(i), i) for i in range(12)] == traced


class Recording(Hook):
    """Act after each `n`-th step and record the calls."""

    def __init__(self, n):
        self.n = n
        self.calls = []

    def next_step(self, runner, step):
        return self.next_multiple(self.n, step)

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.calls.append((runner.iter, outputs))


class EachStep(Hook):
    """Act at each step, by default."""

    def __init__(self):
        self.calls = []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.calls.append(runner.iter)


class Ahead(EachStep):
    """Run ahead of a chunk."""

    runs_ahead = True


class PerChunk(EachStep):
    """Consume the metrics of a chunk."""

    def after_train_chunk(self, runner, batch_idx, data_batch, metrics):
        self.calls.append(("chunk", runner.iter, metrics.num_steps))


def make_hook_list(*hooks):
    hook_list = HookList()
    for hook in hooks:
        hook_list.register(hook)
    return hook_list


def test_a_hook_is_called_at_the_steps_that_it_returns():
    each, third, ahead, per_chunk = EachStep(), Recording(3), Ahead(), PerChunk()
    hooks, runner = make_hook_list(each, third, ahead, per_chunk), runner_at(0)
    for runner.iter in range(9):
        hooks.call(runner, "after_train_iter", dict(batch_idx=runner.iter))
    assert each.calls == ahead.calls == per_chunk.calls == list(range(9))
    assert [step for step, _ in third.calls] == [2, 5, 8]


def test_within_a_chunk_only_hooks_that_run_ahead_are_called():
    third, ahead, per_chunk = Recording(3), Ahead(), PerChunk()
    hooks = make_hook_list(third, ahead, per_chunk)
    hooks.call_ahead(runner_at(2), "after_train_iter", batch_idx=2)
    assert (third.calls, ahead.calls, per_chunk.calls) == ([], [2], [])


def test_after_a_chunk_each_kind_of_hook_is_called_once():
    third, fourth, ahead, per_chunk = Recording(3), Recording(4), Ahead(), PerChunk()
    metrics = ChunkMetrics({"loss": np.array([1.0, 2.0, 3.0]), "norm": np.array([4.0, 5.0, np.nan])},
                           is_update=np.array([True, True, False]), reports={"norm": np.array([True, True, False])})  # fmt: skip
    make_hook_list(third, fourth, ahead, per_chunk).call_after_chunk(runner_at(5), 5, {}, metrics)
    assert third.calls == [(5, {"loss": 3.0})]  # the last step did not update, so that it reports no norm
    assert (fourth.calls, ahead.calls, per_chunk.calls) == ([], [5], [("chunk", 5, 3)])


def test_a_hook_whose_steps_change_is_called_at_the_new_ones():
    third = Recording(3)
    hooks = make_hook_list(third)
    hooks.call(runner_at(0), "after_train_iter", dict(batch_idx=0))
    third.n = 1
    hooks.call(runner_at(1), "after_train_iter", dict(batch_idx=1))
    assert [step for step, _ in third.calls] == [1]


def test_a_chunk_ends_where_a_hook_acts_after_a_step_and_starts_where_one_acts_before():
    hooks = make_hook_list(Recording(3), Recording(4))
    assert [hooks.allows_chunk(runner_at(0), size) for size in (2, 3, 4)] == [True, True, False]
    assert make_hook_list(PerChunk(), Ahead()).allows_chunk(runner_at(4), 100)
    assert make_hook_list(Recording(6), Ahead()).allows_chunk(runner_at(0), 6)
    assert not make_hook_list(EachStep()).allows_chunk(runner_at(0), 2)
    assert make_hook_list().allows_chunk(runner_at(5), 9)

    class Before(Hook):
        def next_step(self, runner, step):
            return self.next_multiple(5, step)

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            pass

    assert make_hook_list(Before()).allows_chunk(runner_at(0), 4)
    assert not make_hook_list(Before()).allows_chunk(runner_at(0), 5)  # step 4 has to be the first of a chunk
    assert make_hook_list(Before()).allows_chunk(runner_at(4), 5)


def test_hooks_that_limit_chunks_to_one_step_are_listed():
    each, first = EachStep(), Recording(1)
    assert make_hook_list(each, Recording(2), PerChunk(), Ahead(), first).list_chunk_blockers(runner_at(0)) == [
        each,
        first,
    ]
