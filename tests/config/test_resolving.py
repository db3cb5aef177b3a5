import collections

import numpy as np
import pytest
from ml_collections import ConfigDict, FieldReference, FrozenConfigDict, config_dict

from jengine.config import check_keys, resolve
from jengine.config.errors import ConfigError, config_path


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


def test_an_empty_required_placeholder_is_an_error_with_its_path():
    cfg = ConfigDict({"model": {"num_classes": config_dict.required_placeholder(int)}})
    with pytest.raises(config_dict.RequiredValueError) as caught:
        resolve(cfg)
    assert caught.value.__notes__ == ["in the config at `model.num_classes`"]


def test_an_unknown_key_is_an_error_with_the_closest():
    known = ("optim_wrapper", "train_cfg", "vars")
    check_keys(ConfigDict({"train_cfg": {}, "vars": {"mine": 1}}), known)
    with pytest.raises(ConfigError) as caught:
        check_keys({"optim_wraper": {}}, known, hint="your own values go under `vars`")
    assert (
        str(caught.value) == "unknown key at the top level of the config: 'optim_wraper'; did you mean 'optim_wrapper'?"
    )
    with pytest.raises(ConfigError, match=r"expected one of: .*, vars \(your own values go under `vars`\)$"):
        check_keys({"zzz": {}}, known, hint="your own values go under `vars`")
    with config_path("train_cfg"), pytest.raises(ConfigError, match="at `train_cfg`: 'zzz'; expected one of: a, b"):
        check_keys(["zzz"], ["a", "b"])
