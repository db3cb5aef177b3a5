import dataclasses
import re
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from jengine.config.errors import UnknownNameError
from jengine.data import MaskedTuple
from jengine.model.selection import find, select, select_array

IMAGE, LABEL = np.zeros((4, 8, 8, 1), np.float32), np.arange(4, dtype=np.int32)


class Pair(NamedTuple):
    image: np.ndarray
    label: np.ndarray


@dataclasses.dataclass
class Plain:
    image: np.ndarray
    label: np.ndarray


@struct.dataclass
class Registered:
    image: np.ndarray
    label: np.ndarray
    name: str = struct.field(pytree_node=False, default="")


@pytest.mark.parametrize(
    ("tree", "selector"),
    [
        ((IMAGE, LABEL), 1),
        ((IMAGE, LABEL), "1"),
        ([IMAGE, LABEL], -1),
        ({"image": IMAGE, "label": LABEL}, "label"),
        ({0: IMAGE, 1: LABEL}, 1),
        ({"a.label": LABEL}, "a.label"),
        (Pair(IMAGE, LABEL), "label"),
        (Pair(IMAGE, LABEL), 1),
        (Plain(IMAGE, LABEL), "label"),
        (Registered(IMAGE, LABEL), "label"),
        (MaskedTuple((IMAGE, LABEL), np.ones(4, bool)), 1),
        (MaskedTuple((IMAGE, LABEL), np.ones(4, bool)), -1),
        ({"heads": [IMAGE, LABEL]}, "heads.1"),
        ({"heads": [IMAGE, LABEL]}, "heads.-1"),
        ((IMAGE, {"aux": Pair(IMAGE, LABEL)}), "1.aux.label"),
    ],
)
def test_entries_are_selected_by_index_name_or_dotted_path(tree, selector):
    assert select(tree, selector, "CrossEntropy.label", "batch") is LABEL


@pytest.mark.parametrize(
    ("tree", "selector", "message"),
    [
        (
            {"image": IMAGE, "label": LABEL},
            "lab",
            "`CrossEntropy.label` must be an entry of the batch, got 'lab'; the batch has image f32[4,8,8,1], label "
            "i32[4]; did you mean 'label'?",
        ),
        ((IMAGE, LABEL), 2, "got 2; the batch has 0 f32[4,8,8,1], 1 i32[4]"),
        ((IMAGE, LABEL), -3, "got -3; the batch has 0 "),
        ((IMAGE, LABEL), "label", "got 'label'; the batch has 0 "),
        ({"aux": {"logits": jnp.ones(2, jnp.bfloat16)}}, "aux.logit", "the batch has aux.logits bf16[2]; did you mean"),
        ({"file": "a.png", "n": None}, "x", "the batch has file str, n NoneType"),
        (LABEL, 0, "the batch is i32[4], without entries"),
        ({"a": {}}, "label", "the batch has a dict"),
        ({}, "label", "the batch is dict, without entries"),
        ({str(i): LABEL for i in range(20)}, "label", "15 i32[4] and 4 more"),
    ],
)
def test_a_missing_entry_lists_those_that_exist(tree, selector, message):
    with pytest.raises(UnknownNameError, match=re.escape(message)):
        select(tree, selector, "CrossEntropy.label", "batch")
    assert find(tree, selector) is None


def test_an_array_has_to_be_chosen_from_several():
    outputs = (IMAGE, {"pre_logits": IMAGE})
    assert select_array(outputs, 0, "CrossEntropy.output", "outputs") is IMAGE
    assert select_array(IMAGE, None, "CrossEntropy.output", "outputs") is IMAGE
    entries = "the outputs have 0 f32[4,8,8,1], 1.pre_logits f32[4,8,8,1]"
    for selector, got in ((None, "got None"), (1, "got 1, a dict")):
        with pytest.raises(UnknownNameError) as error:
            select_array(outputs, selector, "CrossEntropy.output", "outputs")
        assert str(error.value) == f"`CrossEntropy.output` must be set to an array of the outputs, {got}; {entries}"


def test_tracers_can_be_selected():
    assert jax.jit(lambda batch: select(batch, "0.x", "a", "batch") + 1)(({"x": 1.0},)) == 2.0
