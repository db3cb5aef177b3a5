"""Test the JSON text of states, checkpoints and logs."""

import math

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jengine.config.json_codec import decode, decode_object, encode, pack, to_plain, unpack


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


def test_packed_states_come_back_with_their_types():
    state = {"rng": (3, b"\x00\xff"), 4: [None, np.arange(6, dtype=np.int16).reshape(2, 3)], "last": float("inf")}
    restored = unpack(decode(encode(pack(state))))
    assert restored["rng"] == (3, b"\x00\xff")
    assert restored["last"] == float("inf")
    assert restored[4][0] is None
    np.testing.assert_array_equal(restored[4][1], state[4][1])
    assert restored[4][1].dtype == np.int16


def test_large_arrays_are_kept_out_of_the_text():
    state = {"big": np.arange(4096, dtype=np.float64), "bytes": b"x" * 5000, "small": np.ones(2), "also": np.ones(2048)}
    blobs = bytearray()
    text = encode(pack(state, "data", blobs))
    assert len(blobs) == 4096 * 8 + 5000 + 2048 * 8
    assert len(text) < 1000
    restored = unpack(decode(text), bytes(blobs))
    assert restored["bytes"] == state["bytes"]
    for name in ("big", "small", "also"):
        np.testing.assert_array_equal(restored[name], state[name])
    without = unpack(decode(text))
    assert without["big"]["shape"] == [4096]
    np.testing.assert_array_equal(without["small"], state["small"])
    with pytest.raises(ValueError, match="16384 bytes of an array are missing"):
        unpack(decode(text), bytes(blobs[:-1]))


def test_arrays_of_jax_and_keys_come_back():
    state = {
        "key": jax.random.key(3),
        "bf16": jnp.ones(2, jnp.bfloat16),
        "complex": np.array([1j]),
        "scalar": jnp.float32(2),
    }
    restored = unpack(decode(encode(pack(state))))
    assert restored["key"].dtype == state["key"].dtype
    np.testing.assert_array_equal(jax.random.normal(restored["key"]), jax.random.normal(state["key"]))
    for name in ("bf16", "complex", "scalar"):
        assert restored[name].dtype == state[name].dtype
        np.testing.assert_array_equal(restored[name], state[name])


@pytest.mark.parametrize("depth", [101, 3000, 200_000])
def test_json_that_is_nested_too_deeply_is_one_clear_error(depth):
    assert decode("[" * 100 + "]" * 100)
    with pytest.raises(ValueError, match="JSON must be nested at most 100 levels deep"):
        decode("[" * depth + "]" * depth)


def test_an_object_is_required_where_a_file_has_named_entries():
    assert decode_object('{"a": 1}') == {"a": 1}
    for text in ("[1]", "3", "null"):
        with pytest.raises(ValueError, match="it must be a JSON object, got"):
            decode_object(text)
