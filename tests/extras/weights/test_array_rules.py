"""Test the rules that make parameters of stored arrays: functions, stacks, and fused projections."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.checkpoint import CheckpointMismatchError
from jengine.extras.weights import load_pretrained
from jengine.extras.weights.array_rules import rearrange
from tests.refusals import check_refusal

RNG = np.random.RandomState(0)


def random(*shape):
    return RNG.randn(*shape).astype(np.float32)


def zeros(tree):
    return jax.tree.map(lambda shape: np.zeros(shape, np.float32), tree, is_leaf=lambda x: isinstance(x, tuple))


def load(weights, target, *rules, **options):
    """Load with rules that went through JSON, as in a config file."""
    params, _, report = load_pretrained(weights, zeros(target), rename=json.loads(json.dumps(rules)), **options)
    return params, report


def double(array):
    return 2 * array


def test_layers_are_stacked_in_the_order_of_their_numbers():
    weights = {f"blocks.{i}.fc.weight": random(3, 2) for i in range(11)}
    weights |= {f"blocks.{i}.fc.bias": random(3) for i in range(11)}
    for axis in (0, 1, -1):
        kernel, bias = [2, 3], [3]
        kernel.insert(axis % 3, 11), bias.insert(axis % 2, 11)
        target = {"layers": {"fc": {"kernel": tuple(kernel), "bias": tuple(bias)}}}
        params, report = load(weights, target, (r"blocks\.(\d+)", "layers", dict(stack=axis)))
        expected = np.stack([weights[f"blocks.{i}.fc.weight"].T for i in range(11)], axis=axis)
        np.testing.assert_array_equal(params["layers"]["fc"]["kernel"], expected)  # PyTorch's axes are permuted in each
        biases = np.stack([weights[f"blocks.{i}.fc.bias"] for i in range(11)], axis=axis)
        np.testing.assert_array_equal(params["layers"]["fc"]["bias"], biases)
    assert report.matched["layers.fc.bias"] == "blocks.0.fc.bias … blocks.10.fc.bias"
    assert report.reshaped["layers.fc.kernel"] == ("11 x (3, 2)", "(2, 3, 11)")


def test_a_stack_is_put_on_the_devices_and_into_the_dtype_of_the_parameter():
    weights = {f"h.{i}.w": random(2) for i in range(3)}
    params, _, _ = load_pretrained(
        weights, {"h": {"w": jnp.zeros((3, 2), jnp.bfloat16)}}, rename=[(r"h\.(\d)", "h", dict(stack=0))]
    )
    assert params["h"]["w"].dtype == jnp.bfloat16
    expected = np.stack(list(weights.values())).astype(jnp.bfloat16)
    np.testing.assert_array_equal(params["h"]["w"], expected)


def test_a_stacked_array_is_divided_into_numbered_layers():
    stacked = random(3, 4, 2)
    params, report = load(
        {"layers.fc.kernel": stacked},
        {f"layers_{i}": {"fc": {"kernel": (4, 2)}} for i in range(3)},
        ("layers", "layers_{}", dict(unstack=0)),
    )
    for i in range(3):
        np.testing.assert_array_equal(params[f"layers_{i}"]["fc"]["kernel"], stacked[i])
    assert report.fits


def test_fused_projections_are_split_also_into_parts_of_different_sizes():
    fused, bias = random(8, 6), random(8)  # of 2 query heads and one of keys and values, with the size 2
    weights = {"attn.qkv.weight": fused, "attn.qkv.bias": bias, "other.weight": random(5, 6)}
    names = [f"attn.{name}" for name in ("query", "key", "value")]
    target = {
        "attn": {
            "query": {"kernel": (6, 2, 2), "bias": (2, 2)},
            "key": {"kernel": (6, 1, 2), "bias": (1, 2)},
            "value": {"kernel": (6, 1, 2), "bias": (1, 2)},
        },
        "other": {"kernel": (6, 5)},
    }
    params, _ = load(
        weights, target, ("attn.qkv", names, dict(split=dict(axis=0, sizes=[4, 2, 2]), transform="transpose"))
    )
    for name, start, heads in [("query", 0, 2), ("key", 4, 1), ("value", 6, 1)]:
        part = slice(start, start + 2 * heads)
        np.testing.assert_array_equal(params["attn"][name]["kernel"], fused[part].T.reshape(6, heads, 2))
        np.testing.assert_array_equal(params["attn"][name]["bias"], bias[part].reshape(heads, 2))


def test_separate_projections_are_merged_in_each_layer_of_a_stack():
    weights = {f"h.{i}.{name}.weight": random(3, 2) for i in range(2) for name in ("gate", "up")}
    rule = ([r"h\.(\d+)\.gate", r"h\.(\d+)\.up"], "layers.gate_up", dict(merge=0, stack=0))
    params, report = load(weights, {"layers": {"gate_up": {"kernel": (2, 2, 6)}}}, rule)
    expected = [np.concatenate([weights[f"h.{i}.{name}.weight"] for name in ("gate", "up")]).T for i in range(2)]
    np.testing.assert_array_equal(params["layers"]["gate_up"]["kernel"], np.stack(expected))
    assert report.fits
    del weights["h.1.up.weight"]
    with pytest.raises(ValueError, match=r"must find 'h.*up' for 'layers\.gate_up\.weight', got none"):
        load(weights, {"layers": {"gate_up": {"kernel": (2, 2, 6)}}}, rule)


def test_interleaved_projections_are_divided_by_named_axes():
    weight = random(2 * 3 * 4, 5)  # (heads, query or key or value, size), as GPT-NeoX stores them
    target = {name: {"kernel": (5, 2, 4)} for name in ("query", "key", "value")}
    options = dict(reshape="(h n k) d -> n d h k", sizes=dict(h=2, n=3), split=0)
    params, _ = load({"qkv.weight": weight}, target, ("qkv", list(target), options))
    for i, name in enumerate(target):
        expected = weight.reshape(2, 3, 4, 5)[:, i].transpose(2, 0, 1)
        np.testing.assert_array_equal(params[name]["kernel"], expected)


def test_an_array_is_used_twice_left_out_or_transformed_by_a_function_of_a_module():
    weights = {"wte.weight": random(5, 2), "mask": random(1), "scale": random(2)}
    target = {"embed": {"embedding": (5, 2)}, "head": {"kernel": (2, 5)}, "scale": (2,)}
    params, report = load(
        weights,
        target,
        ("wte", ["embed", "head"]),
        ("mask", None),
        ("scale", "scale", dict(transform=f"{__name__}.double")),
    )
    np.testing.assert_array_equal(params["embed"]["embedding"], weights["wte.weight"])
    np.testing.assert_array_equal(params["head"]["kernel"], weights["wte.weight"].T)
    np.testing.assert_array_equal(params["scale"], 2 * weights["scale"])
    assert report.ignored == ("mask",)


@pytest.mark.parametrize(
    ("pattern", "sizes", "expected"),
    [
        ("a b -> b a", {}, lambda x: x.T),
        ("(h k) d -> d h k", {"h": 2}, lambda x: x.reshape(2, 3, 4).transpose(2, 0, 1)),
        ("a (b c) -> (c a) b", {"b": 2}, lambda x: x.reshape(6, 2, 2).transpose(2, 0, 1).reshape(12, 2)),
    ],
)
def test_axes_are_rearranged_by_name(pattern, sizes, expected):
    array = random(6, 4)
    np.testing.assert_array_equal(rearrange(array, pattern, sizes), expected(array))


WEIGHTS = {"h.0.w": np.zeros((2, 3), np.float32), "h.2.w": np.zeros((2, 3), np.float32)}


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ((r"h\.(\d)", "h", dict(stack=0)), ["'h.w'", "got none for 1, by the rule ('h"]),
        (("h.0", "h", dict(stack=0)), ["`old`", "got 0 in ('h.0'"]),
        ((r"h\.0\.(\w)", "h", dict(split=0)), ["`new`", "`split`"]),
        (("h", "h", dict(merge=0)), ["`old`", "`merge`"]),
        (("h", "h", dict(unstack=0)), ["`{}`", "`new`"]),
        (("h", "h", dict(transposed=True)), ["'transposed'", "did you mean 'trans"]),
        (("h", "h", dict(transform="transposed")), ["`transform`", "'transpose'", "'none'"]),
        (("h", "h", dict(sizes=dict(h=2))), ["`sizes`", "`reshape`"]),
        (("h.0", ["h", "b", "c"], dict(split=0)), ["'h.0'", "h.0.w", "(2, 3)"]),
        (("h.0", "h", dict(reshape="(a b) -> a b")), ["(2, 3)"]),
        (("h.0", "h", dict(reshape="(a b) c -> a b c")), ["`sizes`"]),
        (("h.0", "h", dict(reshape="(a b) c -> a b c", sizes=dict(a=3))), ["* b"]),
        (("x", "h", dict(stack=0)), ["got ('x', 'h', {'stack': 0})"]),
        (("h", None, dict(stack=0)), ["`new`", "None"]),
        (("h",), ["`load_pretrained.rename[0]`"]),
    ],
)
def test_a_rule_that_cannot_be_applied_names_itself(rule, words):
    check_refusal(lambda: load(WEIGHTS, {"h": {"w": (2, 2, 3)}}, rule), (ValueError, TypeError, KeyError), *words)


def test_a_weight_with_the_axes_of_a_kernel_is_not_loaded_without_a_rule():
    weight = random(2, 3)
    message = r"fc\.kernel  stored float32\[2,3\], expected float32\[2,3\]; a rule with transform='none' takes the axes"
    with pytest.raises(CheckpointMismatchError, match=message):
        load({"fc.weight": weight}, {"fc": {"kernel": (2, 3)}})
    params, _ = load({"fc.weight": weight}, {"fc": {"kernel": (2, 3)}}, ("", "", dict(transform="none")))
    np.testing.assert_array_equal(params["fc"]["kernel"], weight)
