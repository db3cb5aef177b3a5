"""Test which values of two processes count as equal; tests/parallel/training_cases.py exchanges them for real."""

import pathlib

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config.description import describe, first_difference
from jengine.parallel.processes import SingleProcess, assert_equal_across_processes


@pytest.mark.parametrize(
    ("first", "second"),
    [
        (np.float32(0.1), np.float32(0.2)),
        (np.float32(0.1), np.float64(np.float32(0.1))),
        (np.arange(5000), np.arange(5000) + (np.arange(5000) == 2500)),
        (jnp.ones(3), jnp.zeros(3)),
        (np.dtype("int8"), np.dtype("int16")),
        (pathlib.Path("a"), pathlib.Path("b")),
        (1 + 1j, 1 - 1j),
        ({1, 2}, {1, 3}),
        (lambda x: x + 1, lambda x: x + 2),
    ],
)
def test_values_are_compared_and_not_only_their_types(first, second):
    one, other = (describe({"config": {"model": [value]}}, shallow=True) for value in (first, second))
    path, *_ = first_difference(one, other)
    assert path.startswith("config.model[0]")


def test_objects_functions_and_nan_are_equal():
    values = [{"hook": object(), "call": print, "nan": float("nan"), "steps": (1, 2)} for _ in range(2)]
    assert first_difference(*(describe(value, shallow=True) for value in values)) is None


@pytest.mark.parametrize(
    ("one", "other", "expected"),
    [
        ({"a": [1, 2]}, {"a": [1, 3]}, ("a[1]", "2", "3")),
        ({"a": [1, 2]}, {"a": [1]}, ("a", "[1, 2]", "[1]")),
        ({"a": 1}, {"a": 1, "b": {"c": 2}}, ("b", "nothing", "{'c': 2}")),
        ({"a": None, "b": 1}, {"b": 1}, ("a", "None", "nothing")),
        ({"a": 1}, {"a": 1}, None),
    ],
)
def test_first_difference(one, other, expected):
    assert first_difference(one, other) == expected


def test_a_single_process_has_only_its_own_values():
    assert SingleProcess().all_gather("anything", 3) == [3]
    assert SingleProcess().broadcast("anything", 3) == 3
    assert not SingleProcess().reached_sync_point()
    assert_equal_across_processes(SingleProcess(), {"lr": 0.1})
