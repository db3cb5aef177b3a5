"""Config, with the methods that users of MMEngine know."""

import copy
import pickle

import pytest
from ml_collections import ConfigDict

from jengine.config import apply_overrides, load_config, resolve
from jengine.config.errors import ConfigError
from jengine.extras.mmengine import Config

CFG = {
    "train_cfg": {"max_epochs": 3, "keys": {"a.b": 1, 6: "six"}},
    "custom_hooks": [{"type": "EMAHook", "inner": ({"x": 1}, [])}],
    "work_dir": "runs",
}


def test_a_file_is_loaded_changed_and_written(write, tmp_path):
    path = write(
        "start.py", f"train_cfg = {CFG['train_cfg']}\ncustom_hooks = {CFG['custom_hooks']}\nwork_dir = 'runs'\n"
    )
    cfg = Config.fromfile(path, ["work_dir=other"])
    assert (cfg.filename, cfg.work_dir) == (str(path), "other")
    cfg.merge_from_dict({"work_dir": "runs", "train_cfg": {"val_interval": 2}, "custom_hooks.0.inner.0.x": 5})
    assert cfg.custom_hooks[0].inner[0].x == 5
    assert cfg.train_cfg.val_interval == 2
    for name in ("b.py", "b.json", "b.yaml"):
        assert cfg.dump(tmp_path / name) is None
        assert Config.fromfile(tmp_path / name).train_cfg.val_interval == 2
    assert cfg.dump() == cfg.pretty_text == (tmp_path / "b.py").read_text()
    assert Config.fromstring(cfg.pretty_text) == cfg == load_config(tmp_path / "b.py")


def test_dicts_become_levels_wherever_they_are_assigned():
    cfg = Config()
    cfg.one = {"a": 0}
    cfg.one = {"b": {"c": None}}
    cfg["two"] = [{"d": 1}]
    cfg.update({"one": {"b": {"e": 2}}})
    assert (cfg.one.b.e, cfg.two[0].d, list(cfg)) == (2, 1, ["one", "two"])
    assert cfg.get("three", 3) == 3
    with pytest.raises(AttributeError):
        cfg.three  # noqa: B018
    with pytest.raises(TypeError, match="a config must be a ConfigDict or a dict, got list"):
        Config([0, 1])
    with pytest.raises(ConfigError, match="an index of `two` must be an integer below 1, got 2"):
        cfg.merge_from_dict({"two.2.d": 1})


@pytest.mark.parametrize("make", [copy.copy, copy.deepcopy, Config.copy, lambda cfg: pickle.loads(pickle.dumps(cfg))])
def test_copies_are_equal_and_separate(make):
    cfg = Config(CFG, filename="a.py")
    copied = make(cfg)
    assert type(copied) is Config
    assert (copied.filename, resolve(copied)) == ("a.py", CFG)
    copied.train_cfg["keys"]["a.b"] = 2
    assert copied != cfg == CFG


def test_a_config_is_taken_wherever_a_config_dict_is():
    reference = ConfigDict({"a": 1})
    reference.b = reference.get_ref("a")
    reference.c = [reference.get_ref("a")]
    cfg = Config({"vars": reference})
    cfg.vars.a = 7
    assert apply_overrides(cfg, ["vars.a=8"]).vars.b == 8
    assert cfg == {"vars": {"a": 7, "b": 7, "c": [7]}}


def test_the_difference_has_a_line_for_each_value(write):
    other = write("b.py", "train_cfg = dict(max_epochs=4)\n")
    assert Config.diff({"train_cfg": {"max_epochs": 3, "by_epoch": True}}, str(other)).splitlines() == [
        "- train_cfg.max_epochs = 3",
        "+ train_cfg.max_epochs = 4",
        "- train_cfg.by_epoch = True",
    ]
