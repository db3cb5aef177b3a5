"""Test how far the host runs ahead of the device."""

from jengine.parallel import DispatchLimiter


class Token:
    """An output of a step that records when the host waits for it."""

    waited: list[int]

    def __init__(self, step, waited):
        self.step = step
        self.waited = waited

    def block_until_ready(self):
        self.waited.append(self.step)
        return self


def record_waits(limit, steps):
    """Return, by step, the step for which the host waited before its dispatch."""
    limiter, tokens, waits = DispatchLimiter(limit), [], {}
    for step in range(steps):
        waited = []
        for token in tokens:
            token.waited = waited
        limiter.wait()
        if waited:
            (waits[step],) = waited
        tokens.append(Token(step, waited))
        limiter.add(tokens[-1])
    return waits


def test_with_a_limit_of_two_the_host_waits_for_the_older_step():
    assert record_waits(2, 5) == {2: 0, 3: 1, 4: 2}


def test_with_a_larger_limit_the_host_waits_for_half_of_the_steps():
    assert record_waits(4, 9) == {4: 1, 6: 3, 8: 5}


def test_with_a_limit_of_one_the_host_waits_for_the_previous_step():
    assert record_waits(1, 3) == {1: 0, 2: 1}


def test_drain_waits_for_all_steps():
    waited, limiter = [], DispatchLimiter(4)
    for step in range(2):
        limiter.add(Token(step, waited))
    limiter.drain()
    limiter.drain()
    assert waited == [0, 1]
