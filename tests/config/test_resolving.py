import collections

import numpy as np
from ml_collections import ConfigDict, FieldReference, FrozenConfigDict

from jengine.config import resolve


def test_references_are_resolved_everywhere():
    ref = FieldReference(3)
    cfg = ConfigDict({"a": ref, "items": [ref, (ref + 1, {"b": ref})], "c": ConfigDict({"d": ref * 2})})
    assert resolve(cfg) == {"a": 3, "items": [3, (4, {"b": 3})], "c": {"d": 6}}
    assert isinstance(cfg["items"][0], FieldReference)  # the argument is not modified


def test_config_dicts_inside_lists_become_dicts():
    result = resolve({"hooks": [ConfigDict({"type": "A"})], "f": FrozenConfigDict({"x": 1})})
    assert result == {"hooks": [{"type": "A"}], "f": {"x": 1}}
    assert type(result["hooks"][0]) is dict
    assert type(result["f"]) is dict


def test_objects_are_not_copied():
    pair = collections.namedtuple("pair", "init update")(print, len)
    cfg = {"type": dict, "fn": len, "array": np.arange(3), "pair": pair, "nested": [object]}
    result = resolve(cfg)
    assert result["type"] is dict
    assert result["fn"] is len
    assert result["array"] is cfg["array"]
    assert result["pair"] is pair
    assert result["nested"] == [object]


def test_containers_are_new():
    cfg = {"hooks": [{"a": 1}]}
    resolve(cfg)["hooks"][0]["a"] = 2
    assert cfg == {"hooks": [{"a": 1}]}


def test_the_order_of_keys_is_kept():
    assert list(resolve({"b": 1, "a": {"z": 1, "y": 2}})) == ["b", "a"]
    assert list(resolve(ConfigDict({"b": 1, "a": 2}, sort_keys=False))) == ["b", "a"]
