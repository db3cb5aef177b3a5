import pytest

from jengine.logging import Stopwatch


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_every_second_belongs_to_one_phase():
    clock = Clock()
    timer = Stopwatch(clock)
    clock.now = 5.0  # before the start
    timer.start("setup")
    clock.now = 6.0
    assert timer.enter("step") == "setup"
    clock.now = 9.0

    def failing_save():
        with timer.part("checkpoint"):
            clock.now = 11.0
            raise KeyError

    with timer.part("logging"):
        clock.now = 9.5
        with pytest.raises(KeyError):
            failing_save()
        clock.now = 11.25
    clock.now = 12.25
    assert timer.report() == {"step": 4.0, "checkpoint": 1.5, "setup": 1.0, "logging": 0.75}
    clock.now = 13.25
    assert sum(timer.report().values()) == 8.25  # the time since the start, including the current phase


def test_relabel_changes_the_current_phase_in_retrospect():
    clock = Clock()
    timer = Stopwatch(clock)
    timer.start("input")
    clock.now = 1.0
    previous = timer.enter("step")
    clock.now = 4.0
    timer.relabel("compile")
    timer.enter(previous)
    clock.now = 4.5
    assert timer.report() == {"compile": 3.0, "input": 1.5}
