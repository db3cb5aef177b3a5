"""The history of a scalar: windows, totals beyond the ring, statistics, saving."""

import json
import math

import numpy as np
import pytest

from jengine.logging import HistoryBuffer


def history(values, capacity=10_000):
    buffer = HistoryBuffer(capacity)
    for value in values:
        buffer.update(value)
    return buffer


def test_mean_over_a_window_takes_the_newest_values():
    buffer = history(range(1, 11))
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
    buffer = history([5, -3, 2, 4, 1])
    assert (buffer.max(), buffer.min(), buffer.current()) == (5, -3, 1)
    assert (buffer.max(3), buffer.min(3)) == (4, 1)


def test_the_ring_keeps_the_newest_values_in_order():
    buffer = history(range(10), capacity=4)
    values, counts = buffer.data
    np.testing.assert_array_equal(values, [6, 7, 8, 9])
    np.testing.assert_array_equal(counts, [1, 1, 1, 1])
    assert len(buffer) == 4
    assert buffer.updates == 10


@pytest.mark.parametrize("number", [3, 4, 5, 7, 8, 9, 130])
def test_windows_are_right_wherever_the_ring_stands(number):
    buffer = history(range(number), capacity=4)
    assert buffer.max(2) == number - 1
    assert buffer.min(2) == number - 2
    assert buffer.mean(3) == number - 2


def test_totals_stay_exact_beyond_the_ring():
    buffer = history([100, -50, *range(20)], capacity=4)
    assert buffer.mean() == (100 - 50 + sum(range(20))) / 22
    assert (buffer.max(), buffer.min()) == (100, -50)
    assert buffer.mean(22) == buffer.mean()  # a window over all that ever was is exact as well
    assert buffer.mean(21) == (16 + 17 + 18 + 19) / 4  # in between: what the ring holds


def test_memory_is_bounded_and_no_update_copies_the_history():
    buffer = history(range(300), capacity=128)
    ring = buffer._values
    for value in range(1000):
        buffer.update(value)
    assert buffer._values is ring
    assert ring.nbytes == 128 * 8


def test_nan_is_seen_by_every_statistic_over_it():
    buffer = history([1.0, math.nan, 2.0])
    assert all(math.isnan(value) for value in (buffer.mean(), buffer.max(), buffer.min(), buffer.max(2)))
    assert buffer.max(1) == 2.0


def test_statistics_are_called_by_name():
    buffer = history([1, 2, 3])
    assert buffer.statistics("mean", window_size=2) == 2.5
    assert buffer.statistics("max") == 3
    assert buffer.statistics("min", 2) == 2
    assert buffer.statistics("current") == 3
    assert buffer.statistics("current", window_size=2) == 3


def test_an_unknown_statistic_names_the_closest():
    with pytest.raises(KeyError, match="no statistic is called 'maen'; did you mean 'mean'"):
        history([1]).statistics("maen")


def test_a_registered_statistic_is_called_with_the_buffer(monkeypatch):
    monkeypatch.setattr(HistoryBuffer, "_statistics", dict(HistoryBuffer._statistics))

    @HistoryBuffer.register_statistics
    def span(buffer, window_size=None):
        return buffer.max(window_size) - buffer.min(window_size)

    assert history([1, 5, 3]).statistics("span", window_size=2) == 2
    assert span(history([1, 5, 3])) == 4


@pytest.mark.parametrize("method", ["mean", "max", "min", "current"])
def test_an_empty_history_has_no_statistics(method):
    with pytest.raises(ValueError, match="the history is empty"):
        HistoryBuffer().statistics(method)


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-1, ValueError), (2.0, TypeError), (True, TypeError)])
def test_a_window_is_a_positive_int(window, error):
    with pytest.raises(error, match="window"):
        history([1, 2]).mean(window)


@pytest.mark.parametrize("value", [2, 2.0, True + 1, np.float32(2), np.int64(2), np.array(2.0), np.array([[2]])])
def test_numbers_of_every_kind_are_taken(value):
    assert history([value]).current() == 2.0


@pytest.mark.parametrize("value", ["2", None, 2j, [1.0], {"value": 1}])
def test_what_is_no_real_number_is_refused(value):
    with pytest.raises(TypeError, match="a logged scalar must be a"):
        HistoryBuffer().update(value)


def test_several_elements_are_refused():
    with pytest.raises(ValueError, match=r"one element, got 2 \(shape \(2,\)\)"):
        HistoryBuffer().update(np.ones(2))


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.5, TypeError), (True, TypeError)])
def test_a_count_is_a_positive_int(count, error):
    with pytest.raises(error, match="the count of a logged scalar"):
        HistoryBuffer().update(1.0, count)


def test_a_capacity_below_one_is_refused():
    with pytest.raises(ValueError, match="at least 1, got 0"):
        HistoryBuffer(0)


def test_saving_through_json_keeps_the_tail_and_the_totals():
    buffer = history(range(1000))
    buffer.update(30.0, count=3)
    state = json.loads(json.dumps(buffer.state_dict()))
    assert len(state["values"]) == 256
    restored = HistoryBuffer()
    restored.load_state_dict(state)
    assert restored.mean() == buffer.mean() == (sum(range(1000)) + 30) / 1003
    assert (restored.max(), restored.min(), restored.current(), restored.updates) == (999, 0, 30, 1001)
    assert restored.mean(10) == buffer.mean(10)


def test_updates_go_on_after_a_restore():
    restored = history([7, 7, 7], capacity=4)
    restored.load_state_dict(history(range(6), capacity=4).state_dict())
    restored.update(6)
    np.testing.assert_array_equal(restored.data[0], [3, 4, 5, 6])
    assert restored.mean() == 3.0  # (0 + ... + 6) / 7
