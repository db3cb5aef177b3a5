import math

import pytest
from ml_collections import ConfigDict, config_dict

from jengine.config import apply_overrides, resolve
from jengine.config.errors import ConfigError
from tests.refusals import check_refusal


def override(cfg, *overrides):
    return resolve(apply_overrides(cfg, overrides))


@pytest.mark.parametrize("prefix", ["", "config.", "--config."])
def test_the_prefix_of_ml_collections_flags_is_dropped(prefix):
    cfg = {"optim_wrapper": {"optimizer": {"lr": 1.0}}}
    assert override(cfg, f"{prefix}optim_wrapper.optimizer.lr=0.1") == {"optim_wrapper": {"optimizer": {"lr": 0.1}}}


def test_a_key_named_config_can_be_set():
    assert override({"config": {"a": 1}, "a": 2}, "config.a=3") == {"config": {"a": 3}, "a": 2}
    assert override({"config": {"a": 1}, "a": 2}, "--config.a=3") == {"config": {"a": 1}, "a": 3}


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3), ("1e-3", 0.001), ("-2.5", -2.5), ("(0.9, 0.95)", (0.9, 0.95)), ("[1,2]", [1, 2]),
        ("{'a': 1}", {"a": 1}), ("None", None), ("True", True), ("false", False), ("AdamW", "AdamW"),
        ("'3'", "3"), ("''", ""), ("a=b", "a=b"), ("inf", math.inf), ("work/run 1", "work/run 1"),
    ],
)  # fmt: skip
def test_values_are_python_literals_and_bare_words_are_strings(text, value):
    result = override({}, f"key={text}")["key"]
    assert result == value
    assert type(result) is type(value)


@pytest.mark.parametrize(
    ("old", "text", "new"),
    [(3, "0.5", 0.5), (0.1, "None", None), ("name", "[1, 2]", [1, 2]), ([1, 2, 3], "[]", []), (1, "word", "word"),
     ({"a": 1}, "5", 5), (5, "{'a': 1}", {"a": 1})],
)  # fmt: skip
def test_a_value_may_change_its_type(old, text, new):
    assert override(ConfigDict({"key": old}), f"key={text}") == {"key": new}


def test_items_of_lists_and_tuples_can_be_set():
    cfg = {"custom_hooks": [{"type": "EMAHook", "interval": 1}, {"type": "B"}], "betas": (0.9, 0.999)}
    result = override(cfg, "custom_hooks[0].interval=5", "custom_hooks[-1].type=C", "betas[1]=0.95")
    assert result["custom_hooks"] == [{"type": "EMAHook", "interval": 5}, {"type": "C"}]
    assert result["betas"] == (0.9, 0.95)
    assert cfg["custom_hooks"][0]["interval"] == 1  # the argument is not modified


def test_an_index_may_be_written_as_in_mmengine():
    assert override({"hooks": [{"a": 1}]}, "hooks.0.a=2") == {"hooks": [{"a": 2}]}


def test_new_keys_are_added_below_missing_and_none_values():
    result = override(
        ConfigDict({"optim_wrapper": {"clip_grad": None}}), "optim_wrapper.clip_grad.max_norm=1.0", "a.b.c=2"
    )
    assert result == {"optim_wrapper": {"clip_grad": {"max_norm": 1.0}}, "a": {"b": {"c": 2}}}


def test_keys_with_dots_are_found_and_can_be_added():
    cfg = {"custom_keys": {"backbone.layer0": {"lr_mult": 1.0}}}
    assert override(cfg, "custom_keys.backbone.layer0.lr_mult=0.1") == {
        "custom_keys": {"backbone.layer0": {"lr_mult": 0.1}}
    }
    added = override(ConfigDict({"custom_keys": {}}), "custom_keys['head.fc'].lr_mult=10")
    assert added == {"custom_keys": {"head.fc": {"lr_mult": 10}}}


def test_a_dict_merges_without_delete():
    cfg = {"optimizer": {"type": "SGD", "lr": 0.1}}
    assert override(cfg, "optimizer={'lr': 1}") == {"optimizer": {"type": "SGD", "lr": 1.0}}
    assert override(cfg, "optimizer={'_delete_': True, 'type': 'Lion'}") == {"optimizer": {"type": "Lion"}}


def test_a_required_placeholder_is_filled():
    cfg = ConfigDict({"model": {"num_classes": config_dict.required_placeholder(int)}})
    assert override(cfg, "model.num_classes=10") == {"model": {"num_classes": 10}}


def test_a_later_override_wins():
    assert override({"a": 1}, "a=2", "a=3") == {"a": 3}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("optimizer.lr.x=1", ["'optimizer.lr.x=1'", "`optimizer.lr`", "got 0.1"]),
        ("optimizer.type.lrr=1", ["`optimizer.type`", "got 'SGD'"]),
        ("hooks[2].a=1", ["`hooks`", "got 2"]),
        ("hooks.a=1", ["`hooks`", "got a"]),
        ("hook[0].a=1", ["`hook`", "did you mean 'hooks'"]),
        ("optimizer[0]=1", ["`optimizer`", "got a dict"]),
        ("optimizer.lr", ["key.key=value"]),
        ("=3", ["key.key=value"]),
        ("optimizer.lr=", ["optimizer.lr", "''"]),
        ("optimizer..lr=1", ["'..lr'"]),
        ("hooks[x]=1", ["'[x]'"]),
        ("betas=(0.9, 0.95", ["got (0.9, 0.95"]),
        ("hooks=[SGD]", ["inside brackets"]),
    ],
)  # fmt: skip
def test_errors_name_the_override_and_the_existing_value(text, words):
    cfg = {"optimizer": {"type": "SGD", "lr": 0.1}, "hooks": [{"a": 0}]}
    check_refusal(lambda: apply_overrides(cfg, [text]), ConfigError, *words)
