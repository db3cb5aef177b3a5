import pytest

from jengine.hooks import IterTimerHook
from tests.runner_fixture import Scores


class Clock:
    """Return the given times, one per call."""

    def __init__(self, *times):
        self.times = list(times)

    def __call__(self):
        return self.times.pop(0)


def test_validation_estimates_its_own_remaining_time(runner):
    hook = IterTimerHook(clock=Clock(0.0, 0.0, 0.2, 0.2, 0.4, 0.4, 0.6))
    runner.val_loop = Scores(runner, [], epoch_length=10)
    hook.before_val_epoch(runner)
    for i in range(3):
        hook.before_val_iter(runner, batch_idx=i)
        hook.after_val_iter(runner, batch_idx=i, outputs={})
    assert runner.message_hub.get_info("eta") == pytest.approx(1.4)  # 0.6 s / 3 * 7 left
