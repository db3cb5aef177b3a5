"""Test the history of a scalar: windows, totals beyond the ring, statistics, saving."""

import json
import math

import numpy as np
import pytest

from jengine.logging import HistoryBuffer


def make_history(values, capacity=10_000):
    buffer = HistoryBuffer(capacity)
    for value in values:
        buffer.update(value)
    return buffer


def test_mean_over_a_window_uses_the_newest_values():
    buffer = make_history(range(1, 11))
    assert buffer.mean(10) == 5.5  # (1 + ... + 10) / 10
    assert buffer.mean(4) == 8.5  # (7 + 8 + 9 + 10) / 4
    assert buffer.mean() == 5.5
    assert buffer.mean(1000) == 5.5


def test_mean_is_the_sum_over_the_sum_of_counts():
    buffer = HistoryBuffer()
    buffer.update(6.0, count=3)
    buffer.update(4.0, count=1)
    assert buffer.mean() == 2.5  # (6 + 4) / (3 + 1)
    assert buffer.mean(1) == 4.0


def test_max_min_and_current_over_windows():
    buffer = make_history([5, -3, 2, 4, 1])
    assert (buffer.max(), buffer.min(), buffer.current()) == (5, -3, 1)
    assert (buffer.max(3), buffer.min(3)) == (4, 1)


def test_the_ring_keeps_the_newest_values_in_order():
    buffer = make_history(range(10), capacity=4)
    values, counts = buffer.data
    np.testing.assert_array_equal(values, [6, 7, 8, 9])
    np.testing.assert_array_equal(counts, [1, 1, 1, 1])
    assert len(buffer) == 4
    assert buffer.updates == 10


@pytest.mark.parametrize("num_values", [3, 4, 5, 7, 8, 9, 130])
def test_windows_are_correct_at_any_position_of_the_ring(num_values):
    buffer = make_history(range(num_values), capacity=4)
    assert buffer.max(2) == num_values - 1
    assert buffer.min(2) == num_values - 2
    assert buffer.mean(3) == num_values - 2


def test_totals_stay_exact_beyond_the_ring():
    buffer = make_history([100, -50, *range(20)], capacity=4)
    assert buffer.mean() == (100 - 50 + sum(range(20))) / 22
    assert (buffer.max(), buffer.min()) == (100, -50)
    assert buffer.mean(22) == buffer.mean()  # a window over all updates is exact too
    assert buffer.mean(21) == (16 + 17 + 18 + 19) / 4  # in between, windows are cut to the ring


def test_the_history_keeps_the_newest_values_up_to_its_capacity():
    buffer = make_history(range(300), capacity=128)
    for value in range(1000):
        buffer.update(value)
    values, counts = buffer.data
    assert values.tolist() == list(range(1000 - 128, 1000))
    assert len(buffer) == len(counts) == 128


def test_nan_propagates_to_all_statistics_over_it():
    buffer = make_history([1.0, math.nan, 2.0])
    assert all(math.isnan(value) for value in (buffer.mean(), buffer.max(), buffer.min(), buffer.max(2)))
    assert buffer.max(1) == 2.0


def test_statistics_can_be_called_by_name():
    buffer = make_history([1, 2, 3])
    assert buffer.statistics("mean", window_size=2) == 2.5
    assert buffer.statistics("max") == 3
    assert buffer.statistics("min", 2) == 2
    assert buffer.statistics("current") == 3
    assert buffer.statistics("current", window_size=2) == 3


def test_error_for_an_unknown_statistic_suggests_the_closest():
    with pytest.raises(KeyError, match="no statistic is called 'maen'; did you mean 'mean'"):
        make_history([1]).statistics("maen")


def test_registered_statistics_receive_the_buffer(monkeypatch):
    monkeypatch.setattr(HistoryBuffer, "_statistics", dict(HistoryBuffer._statistics))

    @HistoryBuffer.register_statistics
    def span(buffer, window_size=None):
        return buffer.max(window_size) - buffer.min(window_size)

    assert make_history([1, 5, 3]).statistics("span", window_size=2) == 2
    assert span(make_history([1, 5, 3])) == 4


@pytest.mark.parametrize("method", ["mean", "max", "min", "current"])
def test_statistics_of_an_empty_history_raise(method):
    with pytest.raises(ValueError, match="the history is empty"):
        HistoryBuffer().statistics(method)


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_window_must_be_a_positive_int(window, error):
    with pytest.raises(error, match="window"):
        make_history([1, 2]).mean(window)


@pytest.mark.parametrize("value", [2, 2.0, True + 1, np.float32(2), np.int64(2), np.array(2.0), np.array([[2]])])
def test_numbers_of_all_types_are_accepted(value):
    assert make_history([value]).current() == 2.0


@pytest.mark.parametrize("value", ["2", None, 2j, [1.0], {"value": 1}])
def test_values_that_are_not_real_numbers_are_rejected(value):
    with pytest.raises(TypeError, match="a logged scalar must be a"):
        HistoryBuffer().update(value)


def test_arrays_with_several_elements_are_rejected():
    with pytest.raises(ValueError, match=r"one element, got 2 \(shape \(2,\)\)"):
        HistoryBuffer().update(np.ones(2))


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_count_must_be_a_positive_int(count, error):
    with pytest.raises(error, match="`count` of a logged scalar"):
        HistoryBuffer().update(1.0, count)


def test_capacity_below_one_is_rejected():
    with pytest.raises(ValueError, match="`capacity` must be at least 1, got 0"):
        HistoryBuffer(0)


def test_state_dict_keeps_the_newest_values_and_the_totals_through_json():
    buffer = make_history(range(1000))
    buffer.update(30.0, count=3)
    state = json.loads(json.dumps(buffer.state_dict()))
    assert len(state["values"]) == 256
    restored = HistoryBuffer()
    restored.load_state_dict(state)
    assert restored.mean() == buffer.mean() == (sum(range(1000)) + 30) / 1003
    assert (restored.max(), restored.min(), restored.current(), restored.updates) == (999, 0, 30, 1001)
    assert restored.mean(10) == buffer.mean(10)


def test_updates_continue_after_a_restore():
    restored = make_history([7, 7, 7], capacity=4)
    restored.load_state_dict(make_history(range(6), capacity=4).state_dict())
    restored.update(6)
    np.testing.assert_array_equal(restored.data[0], [3, 4, 5, 6])
    assert restored.mean() == 3.0  # (0 + ... + 6) / 7
