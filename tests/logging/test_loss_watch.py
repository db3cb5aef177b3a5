import math

import pytest

from jengine.logging import MessageHub
from jengine.logging.loss_watch import LossWatch


def watch_hub(losses, counters=(), at=None, resumed=None):
    """Return a hub that has fetched losses, and a counter at the iterations `at`."""
    hub = MessageHub("watched")
    if resumed is not None:
        hub.update_scalar("train/skipped_steps", resumed)
        hub.flush()
    hub.losses = LossWatch()
    for iteration, loss in enumerate(losses):
        hub.iteration = iteration
        hub.update_scalar("train/loss", loss)
        if iteration in (range(len(losses)) if at is None else at) and counters:
            hub.update_scalar("train/skipped_steps", counters.pop(0))
    hub.flush()
    return hub.losses


def test_the_first_non_finite_loss_is_found_once():
    watch = watch_hub([1.0, math.inf, math.nan])
    assert watch.pop() == (1, math.inf)
    assert watch.pop() is None


@pytest.mark.parametrize(
    ("counters", "at", "resumed", "found"),
    [
        ([0, 1, 2, 2], None, None, 3),  # two steps were skipped
        ([0, 1, 1, 1], None, None, 2),
        ([1, 1, 1, 1], None, 1, 1),  # one was skipped before the restart
        ([math.nan, 1, math.nan, 2], None, None, None),
        ([0, 1], [0, 3], None, None),  # an accumulation window of three iterations
        ([0, 0], [0, 3], None, 1),
        ([1], [3], None, None),  # the first window of the run
        ([2], [3], 1, None),  # the first window after a restart
    ],
)
def test_steps_that_were_skipped_do_not_count(counters, at, resumed, found):
    watch = watch_hub([1.0, math.nan, math.nan, math.nan], counters, at, resumed)
    assert (watch.pop() or (None,))[0] == found


def test_a_loss_within_an_accumulation_window_waits_for_its_end():
    watch = watch_hub([1.0, 1.0, math.nan], [0], [1])
    assert watch.pop(waits=True) is None
    watch.add("train/skipped_steps", [3], [1.0], 0.0)
    assert watch.pop(waits=True) is None
    watch.add("train/loss", [4], [math.nan], 1.0)
    watch.add("train/skipped_steps", [5], [1.0], 1.0)
    assert watch.pop(waits=True) == (4, pytest.approx(math.nan, nan_ok=True))
