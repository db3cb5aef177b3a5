import pytest

from jengine.logging import PhaseTimer


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


def test_every_second_falls_into_one_part():
    clock = Clock()
    account = PhaseTimer(clock)
    clock.now = 5.0  # before the start
    account.start("setup")
    clock.now = 6.0
    assert account.enter("step") == "setup"
    clock.now = 9.0

    def failing_save():
        with account.phase("checkpoint"):
            clock.now = 11.0
            raise KeyError

    with account.phase("logging"):
        clock.now = 9.5
        with pytest.raises(KeyError):
            failing_save()
        clock.now = 11.25
    clock.now = 12.25
    assert account.report() == {"step": 4.0, "checkpoint": 1.5, "setup": 1.0, "logging": 0.75}
    clock.now = 13.25
    assert sum(account.report().values()) == 8.25  # all since the start, the part that runs included


def test_what_a_piece_of_work_was_may_be_told_afterwards():
    clock = Clock()
    account = PhaseTimer(clock)
    account.start("input")
    clock.now = 1.0
    before = account.enter("step")
    clock.now = 4.0
    account.relabel("compile")
    account.enter(before)
    clock.now = 4.5
    assert account.report() == {"compile": 3.0, "input": 1.5}
