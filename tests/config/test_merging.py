import pytest
from ml_collections import ConfigDict

from jengine.config import apply_overrides, merge, resolve

BASE = {
    "optim_wrapper": {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.1, "momentum": 0.9}},
    "custom_hooks": [{"type": "A"}, {"type": "B"}],
}


@pytest.mark.parametrize("kind", [dict, ConfigDict])
def test_dicts_merge_and_lists_are_replaced(kind):
    base = kind(BASE)
    result = merge(base, {"optim_wrapper": {"optimizer": {"lr": 0.2}}, "custom_hooks": [{"type": "C"}]})
    assert type(result) is kind
    assert resolve(result) == {
        "optim_wrapper": {"type": "OptimWrapper", "optimizer": {"type": "SGD", "lr": 0.2, "momentum": 0.9}},
        "custom_hooks": [{"type": "C"}],
    }
    assert resolve(base) == BASE


@pytest.mark.parametrize("kind", [dict, ConfigDict])
def test_delete_replaces_a_dict_and_is_removed(kind):
    override = kind({"optim_wrapper": {"optimizer": {"_delete_": True, "type": "AdamW", "lr": 1e-3}}})
    result = resolve(merge(kind(BASE), override))
    assert result["optim_wrapper"] == {"type": "OptimWrapper", "optimizer": {"type": "AdamW", "lr": 1e-3}}
    assert merge(BASE, {"_delete_": True, "a": 1}) == {"a": 1}
    assert merge(BASE, {"new": {"_delete_": True, "a": 1}})["new"] == {"a": 1}


def test_the_result_shares_no_container_with_the_base():
    result = merge(BASE, {})
    result["custom_hooks"][0]["type"] = "changed"
    result["optim_wrapper"]["optimizer"]["lr"] = 5
    assert BASE["custom_hooks"][0]["type"] == "A"
    assert BASE["optim_wrapper"]["optimizer"]["lr"] == 0.1


def test_keys_with_dots_are_kept_in_a_config_dict():
    base = ConfigDict({"custom_keys": {"a.b": {"lr_mult": 1.0}}}, allow_dotted_keys=True)
    result = merge(base, {"custom_keys": {"c.d": {"lr_mult": 2.0}}})
    assert resolve(result) == {"custom_keys": {"a.b": {"lr_mult": 1.0}, "c.d": {"lr_mult": 2.0}}}


def test_references_of_the_base_follow_overrides_now_and_later():
    base = ConfigDict({"lr": 1.0})
    base.warmup = base.get_ref("lr") * 0.5
    result = merge(base, {"lr": 2.0})
    assert resolve(result) == {"lr": 2.0, "warmup": 1.0}
    assert resolve(apply_overrides(result, ["lr=4.0"])) == {"lr": 4.0, "warmup": 2.0}
    assert resolve(base) == {"lr": 1.0, "warmup": 0.5}


def test_a_dict_replaces_none_but_not_another_value():
    assert merge({"clip_grad": None}, {"clip_grad": {"max_norm": 1}}) == {"clip_grad": {"max_norm": 1}}
    with pytest.raises(TypeError, match="'lr' must be a dict in the base config to merge with a dict, got float"):
        merge({"lr": 0.1}, {"lr": {"type": "Cosine"}})
