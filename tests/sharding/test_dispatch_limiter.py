"""How far the host runs ahead of the device."""

from jengine.sharding import DispatchLimiter


class Token:
    """An output of a step that records when it is waited for."""

    waited: list[int]

    def __init__(self, step, waited):
        self.step = step
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(self.step)
        return self


def waits(limit, steps):
    """step -> the step that the host waited for before it was dispatched."""
    limiter, tokens, found = DispatchLimiter(limit), [], {}
    for step in range(steps):
        waited = []
        for token in tokens:
            token.waited = waited
        limiter.wait()
        if waited:
            (found[step],) = waited
        tokens.append(Token(step, waited))
        limiter.add(tokens[-1])
    return found


def test_of_two_in_flight_the_older_is_waited_for():
    assert waits(2, 5) == {2: 0, 3: 1, 4: 2}


def test_of_more_half_are_waited_for_at_once():
    assert waits(4, 9) == {4: 1, 6: 3, 8: 5}


def test_of_one_the_one_before_is_waited_for():
    assert waits(1, 3) == {1: 0, 2: 1}


def test_draining_waits_for_all():
    waited, limiter = [], DispatchLimiter(4)
    for step in range(2):
        limiter.add(Token(step, waited))
    limiter.drain()
    limiter.drain()
    assert waited == [0, 1]
