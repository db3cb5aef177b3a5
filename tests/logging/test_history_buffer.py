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
    with pytest.raises(ValueError, match="`window_size` must be 1 to 4, .* got 21"):  # in between nothing is cut
        buffer.mean(21)


def test_the_history_keeps_the_newest_values_up_to_its_capacity():
    buffer = make_history(range(300), capacity=128)
    for value in range(1000):
        buffer.update(value)
    values, counts = buffer.data
    assert values.tolist() == list(range(1000 - 128, 1000))
    assert len(buffer) == len(counts) == 128


def test_what_is_not_finite_has_no_part_in_means_and_nan_none_in_extrema():
    buffer = make_history([1.0, math.nan, 2.0, math.inf, 6.0])
    assert (buffer.mean(), buffer.mean(4), buffer.mean("epoch")) == (3.0, 4.0, 3.0)
    assert (buffer.max(), buffer.max(4), buffer.min(), buffer.min(2)) == (math.inf, math.inf, 1.0, 6.0)
    assert make_history([1.0, math.inf, -math.inf, 3.0]).mean(3) == 3.0


def test_without_a_number_a_statistic_is_the_newest_value():
    buffer = make_history([1.0, math.nan, math.inf, math.nan])
    assert math.isnan(buffer.mean(3))
    assert math.isnan(buffer.max(1))
    assert make_history([1.0, math.nan, math.inf]).mean(2) == math.inf


def test_a_mean_weights_values_and_one_with_weight_zero_does_not_count():
    buffer = make_history([1.0])
    buffer.extend([5.0, 100.0, 3.0], weights=[4.0, 0.0, 2.0])
    buffer.update(9.0)
    expected = (1 + 5 * 4 + 3 * 2 + 9) / 8
    assert buffer.mean() == buffer.mean("epoch") == expected
    assert (buffer.max(), buffer.max(4), buffer.mean(3), buffer.current()) == (9.0, 9.0, (3 * 2 + 9) / 3, 9.0)
    restored = HistoryBuffer()
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    assert (restored.mean(), restored.mean(4)) == (expected, (5 * 4 + 3 * 2 + 9) / 7)


@pytest.mark.parametrize("capacity", [4, 10_000])
@pytest.mark.parametrize("interrupted", [False, True])
def test_the_window_epoch_has_all_values_since_its_start(capacity, interrupted):
    buffer = make_history(range(100), capacity)
    buffer.start_epoch(100)
    buffer.extend([float(i) for i in range(40)])
    if interrupted:
        state = json.loads(json.dumps(buffer.state_dict()))
        buffer = HistoryBuffer(capacity)
        buffer.load_state_dict(state)
    buffer.extend([float(i) for i in range(40, 60)])
    assert (buffer.mean("epoch"), buffer.min("epoch"), buffer.max("epoch")) == (29.5, 0, 59)
    assert (buffer.epoch_start, buffer.epoch_updates, buffer.updates) == (100, 60, 160)
    assert buffer.mean() == (sum(range(100)) + sum(range(60))) / 160


def test_a_window_that_was_asked_for_is_saved_whole():
    buffer = make_history(range(1000))
    assert buffer.mean(400) == 799.5
    restored = HistoryBuffer()
    restored.load_state_dict(json.loads(json.dumps(buffer.state_dict())))
    restored.update(1000)
    assert restored.mean(400) == 800.5


def test_a_state_of_an_earlier_version_is_read():
    old = {"values": [2.0, 3.0], "counts": [1, 1], "updates": 9, "sum": 27.0, "count": 9, "max": 5.0, "min": 1.0}
    buffer = HistoryBuffer()
    buffer.load_state_dict(old)
    assert (buffer.mean(), buffer.mean(2), buffer.max(), buffer.min()) == (3.0, 2.5, 5.0, 1.0)


def test_statistics_can_be_called_by_name():
    buffer = make_history([1, 2, 3])
    assert buffer.statistics("mean", window_size=2) == 2.5
    assert buffer.statistics("max") == 3
    assert buffer.statistics("min", 2) == 2
    assert buffer.statistics("current") == 3
    assert buffer.statistics("current", window_size=2) == 3


def test_registered_statistics_receive_the_buffer(monkeypatch):
    monkeypatch.setattr(HistoryBuffer, "_statistics", dict(HistoryBuffer._statistics))

    @HistoryBuffer.register_statistics
    def span(buffer, window_size=None):
        return buffer.max(window_size) - buffer.min(window_size)

    assert make_history([1, 5, 3]).statistics("span", window_size=2) == 2
    assert span(make_history([1, 5, 3])) == 4


@pytest.mark.parametrize(("window", "error"), [(0, ValueError), (-1, ValueError), (1.5, TypeError), ("all", TypeError)])
def test_window_must_be_a_positive_int(window, error):
    with pytest.raises(error):
        make_history([1, 2]).mean(window)


@pytest.mark.parametrize("value", [2, 2.0, True + 1, np.float32(2), np.int64(2), np.array(2.0), np.array([[2]])])
def test_numbers_of_all_types_are_accepted(value):
    assert make_history([value]).current() == 2.0


@pytest.mark.parametrize("value", ["2", None, 2j, [1.0], {"value": 1}])
def test_values_that_are_not_real_numbers_are_rejected(value):
    with pytest.raises(TypeError):
        HistoryBuffer().update(value)


@pytest.mark.parametrize(("count", "error"), [(0, ValueError), (1.5, TypeError), ("2", TypeError)])
def test_count_must_be_a_positive_int(count, error):
    with pytest.raises(error, match="`count` of a logged scalar|integer"):
        HistoryBuffer().update(1.0, count)


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
