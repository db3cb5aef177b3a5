"""Test which values of two processes count as equal; tests/parallel/training_cases.py exchanges them for real."""



from jengine.parallel.processes import (
    SingleProcess,
    assert_equal_across_processes,
)


class TwoProcesses(SingleProcess):
    """Stand in for the first of two processes, of which the second has other values."""

    count = 2

    def __init__(self, other):
        self._other = other

    def all_gather(self, what, value):
        return [value, self._other.setdefault("hash", value)]

    def broadcast(self, what, value, source=0):
        return self._other["values"] if source else value


class Recorder(SingleProcess):
    """Stand in for the second process, to see what it sends."""

    count = 2

    def __init__(self):
        self.sent = {}

    def all_gather(self, what, value):
        self.sent["hash"] = value
        return [value, value + "x"]

    def broadcast(self, what, value, source=0):
        self.sent["values"] = value
        return value


def compare(first, second):
    """Compare the values of two processes."""
    recorder = Recorder()
    assert_equal_across_processes(recorder, second)
    assert_equal_across_processes(TwoProcesses(recorder.sent), first)


def test_objects_functions_and_nan_are_equal():
    compare(*({"hook": object(), "call": print, "nan": float("nan"), "steps": (1, 2)} for _ in range(2)))


def test_a_single_process_has_only_its_own_values():
    assert SingleProcess().all_gather("anything", 3) == [3]
    assert SingleProcess().broadcast("anything", 3) == 3
    assert not SingleProcess().reached_sync_point()
    assert_equal_across_processes(SingleProcess(), {"lr": 0.1})
