"""Test when hooks are called at the two stages of a training iteration, and which chunks of steps they allow."""

import math
import types

import jax
import numpy as np
import pytest

from jengine.config.errors import ConfigError
from jengine.extras.diagnose import (
    EmptyCacheHook,
    MemoryProfilerHook,
    ProfilerHook,
)
from jengine.hooks import CheckInvalidLossHook, CheckpointHook, Hook
from jengine.hooks.hook_list import HookList
from jengine.train.scanned_step import ChunkMetrics
from tests.refusals import check_refusal

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
    "invalid loss": (CheckInvalidLossHook(interval=5), lambda i: (i + 1) % 5 == 0),
    "memory": (MemoryProfilerHook(interval=9), lambda i: (i + 1) % 9 == 0),
    "empty cache": (EmptyCacheHook(after_iter=True), lambda i: True),
    "empty cache of epochs": (EmptyCacheHook(), lambda i: False),
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
    """Record the calls."""

    def __init__(self, every=None, acts_on="state"):
        self.every, self.acts_on, self.calls = every, acts_on, []

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        self.calls.append(runner.iter)


class Irregular(Recording):
    """Act after each third step."""

    def next_step(self, runner, step):
        return self.next_multiple(3, step)


def make_hook_list(*hooks):
    hook_list = HookList()
    for hook in hooks:
        hook_list.register(hook)
    return hook_list


def call_after(hooks, step, acts_on=None):
    hooks.call("after_train_iter", runner_at(step), *([] if acts_on is None else [(acts_on,)]), batch_idx=step)


def test_a_hook_is_called_at_its_steps():
    each, third, irregular, never = Recording(), Recording(3), Irregular(), Recording(-1)
    hooks = make_hook_list(each, third, irregular, never)
    for step in range(9):
        call_after(hooks, step)
    assert each.calls == list(range(9))
    assert third.calls == irregular.calls == [2, 5, 8]
    assert never.calls == []


def test_hooks_are_called_by_what_they_act_on():
    hooks = [Recording(acts_on=kind) for kind in ("state", "metrics", "hyperparams")]
    call_after(make_hook_list(*hooks), 2, "metrics")
    assert [hook.calls for hook in hooks] == [[], [2], []]


def test_hooks_are_asked_for_their_stages_once():
    class Counting(Hook):
        asked = 0

        def get_triggered_stages(self):
            self.asked += 1
            return super().get_triggered_stages()

    hook = Counting()
    hooks = make_hook_list(hook)
    for step in range(10):  # no hook limits a chunk, and none has the stage
        assert hooks.allows_chunk(runner_at(step), 4)
        call_after(hooks, step)
    assert hook.asked == 3  # before and after an iteration for chunks, and after one for the call


def test_the_metrics_of_a_step_in_a_chunk_are_those_that_it_reports():
    chunk = ChunkMetrics({"loss": np.array([1.0, 2.0]), "norm": np.array([4.0, np.nan])}, {"norm": np.array([True, False])})
    assert [dict(chunk.at(i)) for i in range(2)] == [{"loss": 1.0, "norm": 4.0}, {"loss": 2.0}]
    assert len(chunk.at(1)) == 1
    assert "norm" not in chunk.at(1)
    assert jax.tree.map(float, chunk.at(1)) == {"loss": 2.0}


@pytest.mark.parametrize(("changes", "words"), [
    (dict(every=2.5), ["`Recording.every`"]),
    (dict(acts_on="loss"), ["`Recording.acts_on`"]),
])  # fmt: skip
def test_a_hook_with_another_declaration_is_refused(changes, words):
    check_refusal(lambda: make_hook_list(Recording(**changes)), ConfigError, *words)


def test_a_hook_whose_steps_change_is_called_at_the_new_ones():
    third = Recording(3)
    hooks = make_hook_list(third)
    call_after(hooks, 0)
    third.every = 1
    call_after(hooks, 1)
    assert third.calls == [1]


def test_a_chunk_ends_where_a_hook_acts_after_a_step_and_starts_where_one_acts_before():
    hooks = make_hook_list(Recording(3), Recording(4))
    assert [hooks.allows_chunk(runner_at(0), size) for size in (2, 3, 4)] == [True, True, False]
    others = Recording(acts_on="metrics"), Recording(acts_on="hyperparams"), Recording(-1)
    assert make_hook_list(*others).allows_chunk(runner_at(4), 100)
    assert make_hook_list(Recording(6), *others).allows_chunk(runner_at(0), 6)
    assert not make_hook_list(Recording()).allows_chunk(runner_at(0), 2)
    assert make_hook_list().allows_chunk(runner_at(5), 9)

    class Before(Hook):
        every = 5

        def before_train_iter(self, runner, batch_idx, data_batch=None):
            pass

    assert make_hook_list(Before()).allows_chunk(runner_at(0), 4)
    assert not make_hook_list(Before()).allows_chunk(runner_at(0), 5)  # step 4 has to be the first of a chunk
    assert make_hook_list(Before()).allows_chunk(runner_at(4), 5)


def test_hooks_that_limit_chunks_to_one_step_are_listed():
    each, first = Recording(), Recording(1)
    hooks = make_hook_list(each, Recording(2), Recording(acts_on="metrics"), Recording(acts_on="hyperparams"), first)
    assert hooks.list_chunk_blockers(runner_at(0)) == [each, first]
