"""Test which values of two processes count as equal; tests/parallel/training_cases.py exchanges them for real."""

import functools
import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.parallel.processes import (
    ProcessMismatchError,
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


@pytest.mark.parametrize(
    ("first", "second", "shown"),
    [
        (0.1, 0.2, "got 0.1 on process 0 and 0.2 on process 1"),
        (np.float32(0.1), np.float32(0.2), "model[0]"),
        (np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500), "ndarray int64[5000]"),
        (jnp.ones(3), jnp.zeros(3), "float32[3]"),
        (np.dtype("int8"), np.dtype("int16"), "'int8'"),
        (pathlib.Path("a"), pathlib.Path("b"), "'a'"),
        (1 + 1j, 1 - 1j, "(1+1j)"),
        ({1, 2}, {1, 3}, "['1', '2']"),
        (np.sin, np.cos, "'numpy.sin'"),
        (functools.partial(max, key=abs), functools.partial(max, key=len), "`config.model[0].key`"),
        ([1, 2], [1], "model[0][1]` must be the same on all processes, got 2 on process 0 and nothing on"),
        ({}, {"c": 2}, "model[0].c` must be the same on all processes, got nothing on process 0 and 2 on"),
    ],
)
def test_values_are_compared_and_not_only_their_types(first, second, shown):
    with pytest.raises(ProcessMismatchError) as error:
        compare({"config": {"model": [first]}}, {"config": {"model": [second]}})
    assert shown in str(error.value)


def test_objects_functions_and_nan_are_equal():
    compare(*({"hook": object(), "call": print, "nan": float("nan"), "steps": (1, 2)} for _ in range(2)))


def test_a_single_process_has_only_its_own_values():
    assert SingleProcess().all_gather("anything", 3) == [3]
    assert SingleProcess().broadcast("anything", 3) == 3
    assert not SingleProcess().reached_sync_point()
    assert_equal_across_processes(SingleProcess(), {"lr": 0.1})
