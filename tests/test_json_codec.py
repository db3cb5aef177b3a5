"""Test the JSON text of states, checkpoints and logs."""

import math

import ml_dtypes
import numpy as np
import pytest

from jengine.json_codec import decode, encode, pack, to_plain, unpack


def test_floats_that_json_lacks_come_back_from_a_checkpoint():
    values = {"scores": [1.5, float("nan"), float("inf")], "name": "NaN"}
    restored = decode(encode(values))
    assert math.isnan(restored["scores"][1])
    assert restored["scores"][::2] == [1.5, float("inf")]
    assert restored["name"] == "NaN"


def test_a_bare_nan_of_earlier_versions_is_read():
    assert math.isnan(decode('{"loss": NaN}')["loss"])


def test_log_lines_have_numbers_for_small_arrays_and_strings_that_float_reads():
    line = encode({"loss": np.array([float("-inf")]), 3: np.ones(2, np.float32)}, for_logs=True)
    assert line == '{"loss": "-Infinity", "3": [1.0, 1.0]}'
    assert float(decode(line)["loss"]) == float("-inf")


@pytest.mark.parametrize("value", [np.array([1.5]), (1.5,), [np.float32(1.5)], np.array([1.5], ml_dtypes.bfloat16)])
def test_sequences_become_lists(value):
    assert to_plain(value) == [1.5]


@pytest.mark.parametrize("value", [{1, 2}, object(), np.array(["2020-01-01"], np.datetime64), 1j, np.complex64(1)])
def test_other_values_are_refused_with_their_path(value):
    with pytest.raises(TypeError, match=r"`hooks\.Mine\.0` must be JSON-serializable"):
        encode({"Mine": [value]}, "hooks")


def test_a_key_that_is_not_a_string_is_refused():
    with pytest.raises(TypeError, match="the keys of `hooks` must be strings, got 3"):
        encode({3: 1}, "hooks")


def test_packed_states_come_back_with_their_types():
    state = {"rng": (3, b"\x00\xff"), 4: [None, np.arange(6, dtype=np.int16).reshape(2, 3)], "last": float("inf")}
    restored = unpack(decode(encode(pack(state))))
    assert restored["rng"] == (3, b"\x00\xff")
    assert restored["last"] == float("inf")
    assert restored[4][0] is None
    np.testing.assert_array_equal(restored[4][1], state[4][1])
    assert restored[4][1].dtype == np.int16
