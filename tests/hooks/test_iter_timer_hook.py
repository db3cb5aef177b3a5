import jax.numpy as jnp
import pytest

from jengine.hooks import IterTimerHook
from tests.runner_fixture import Scores


class Clock:
    """Return the given times, one per call."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self):
        return self.times.pop(0)


def run(runner, hook, start, iters, mode="train"):
    for i in range(start, start + iters):
        if mode == "train":
            runner.train_loop.iter = i
        getattr(hook, f"before_{mode}_iter")(runner, batch_idx=i)
        getattr(hook, f"after_{mode}_iter")(runner, batch_idx=i, outputs={})


def test_the_remaining_time_is_the_mean_time_times_the_remaining_iterations(runner):
    # three iterations of 0.5, 1.0 and 1.5 s: 3.0 s / 3 * 7 left
    hook = IterTimerHook(clock=Clock(0.0, 0.1, 0.5, 0.6, 1.5, 1.6, 3.0))
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    run(runner, hook, 0, 3)
    assert runner.message_hub.get_info("eta") == pytest.approx(7.0)
    assert runner.message_hub.get_scalar("train/time").data[0].tolist() == pytest.approx([0.5, 1.0, 1.5])
    assert runner.message_hub.get_scalar("train/data_time").data[0].tolist() == pytest.approx([0.1, 0.1, 0.1])


def test_a_resumed_run_estimates_from_its_own_iterations(runner):
    hook = IterTimerHook(clock=Clock(0.0, 0.1, 1.0, 1.1, 2.0))
    runner.train_loop.iter = 5
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    run(runner, hook, 5, 2)
    assert runner.message_hub.get_info("eta") == pytest.approx(3.0)  # 2.0 s / 2 * 3 left


def test_validation_estimates_its_own_remaining_time(runner):
    hook = IterTimerHook(clock=Clock(0.0, 0.0, 0.2, 0.2, 0.4, 0.4, 0.6))
    runner.val_loop = Scores(runner, [], epoch_length=10)
    hook.before_val_epoch(runner)
    run(runner, hook, 0, 3, mode="val")
    assert runner.message_hub.get_info("eta") == pytest.approx(1.4)  # 0.6 s / 3 * 7 left


def test_the_time_of_a_validation_does_not_count_for_the_next_iteration(runner):
    hook = IterTimerHook(clock=Clock(0.0, 0.0, 1.0, 1.0, 50.0, 100.0, 100.5, 101.0))
    hook.before_train(runner)
    hook.before_train_epoch(runner)
    run(runner, hook, 0, 1)
    hook.before_val_epoch(runner)
    hook.after_val_epoch(runner)
    hook.after_val(runner)
    run(runner, hook, 1, 1)
    assert runner.message_hub.get_scalar("train/time").data[0].tolist() == pytest.approx([1.0, 1.0])
    assert runner.message_hub.get_scalar("train/data_time").data[0].tolist() == pytest.approx([0.0, 0.5])


def test_blocking_waits_for_the_outputs_before_the_time_is_taken(runner, monkeypatch):
    order = []
    monkeypatch.setattr("jax.block_until_ready", lambda x: order.append("wait"))
    for block, expected in ((True, ["wait", "clock"]), (False, ["clock"])):
        hook = IterTimerHook(block=block, clock=lambda: order.append("clock") or 0.0)
        hook.before_train(runner)
        order.clear()
        hook.after_train_iter(runner, batch_idx=0, outputs={"loss": jnp.zeros(())})
        assert order == expected
