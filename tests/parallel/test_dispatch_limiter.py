"""How far the host runs ahead of the device."""

from jengine.parallel import DispatchLimiter


class Token:
    """An output of a step that says when somebody waits for it."""

    waited: list[int]

    def __init__(self, step, waited):
        self.step = step
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(self.step)


def waits(limit, steps):
    """step -> the step that the host has waited for before it was dispatched."""
    dispatch_limiter, found = DispatchLimiter(limit), {}
    for step in range(steps):
        waited = []
        for token in dispatch_limiter._tokens:
            token.waited = waited
        dispatch_limiter.wait()
        if waited:
            (found[step],) = waited
        dispatch_limiter.add(Token(step, waited))
    return found


def test_of_two_in_flight_the_older_is_waited_for():
    assert waits(2, 5) == {2: 0, 3: 1, 4: 2}


def test_of_more_half_are_waited_for_at_once():
    assert waits(4, 9) == {4: 1, 6: 3, 8: 5}


def test_of_one_the_one_before_is_waited_for():
    assert waits(1, 3) == {1: 0, 2: 1}


def test_draining_waits_for_all():
    import numpy as np

    dispatch_limiter = DispatchLimiter(4)
    for _ in range(3):
        dispatch_limiter.add({"x": np.zeros(2)})  # a pytree will do
    dispatch_limiter.drain()
    assert not dispatch_limiter._tokens
