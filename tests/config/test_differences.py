"""Test attributes within lists, and the differences of two configs."""

import json

import pytest

from jengine.cli import main
from jengine.config import diff_configs, load_config, resolve, write_config

CFG = {
    "train_cfg": {"by_epoch": True, "max_epochs": 3},
    "custom_hooks": [{"type": "EMAHook", "momentum": 2e-4, "inner": [{"value": 1}]}],
    "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3, "eps": float("inf")}},
}


def test_keys_in_lists_are_attributes(write):
    path = write(
        "hooks.py", f"def get_config():\n    return {CFG['custom_hooks']!r} and dict(hooks={CFG['custom_hooks']!r})"
    )
    cfg = load_config(path)
    assert cfg.hooks[0].momentum == 2e-4
    assert cfg.hooks[0].inner[0].value == 1
    cfg.hooks[0].momentum = 0.1
    assert resolve(cfg)["hooks"][0]["momentum"] == 0.1
    with pytest.raises(AttributeError, match="the config has no key 'momentun'; did you mean 'momentum'"):
        cfg.hooks[0].momentun  # noqa: B018
    assert type(resolve(cfg)["hooks"][0]) is dict


def test_the_differences_of_two_configs_have_paths(capsys, write, tmp_path):
    other = {
        **CFG,
        "train_cfg": {"by_epoch": True},
        "custom_hooks": [{"type": "EMAHook", "momentum": 1e-4, "inner": []}],
    }
    differences = diff_configs(CFG, {**other, "seed": 1})
    assert differences == {
        "train_cfg.max_epochs": (3, ...),
        "custom_hooks[0].momentum": (2e-4, 1e-4),
        "custom_hooks[0].inner[0].value": (1, ...),
        "seed": (..., 1),
    }
    assert diff_configs(CFG, json.loads(json.dumps(CFG))) == {}
    write_config(CFG, tmp_path / "a" / "config.py")  # a work dir
    write_config(other, tmp_path / "b.py")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b.py"), "--config.train_cfg.max_epochs=5"]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line
    ]
    assert ["train_cfg.max_epochs", "3", "5"] in rows
    assert ["custom_hooks[0].inner[0].value", "1", ""] in rows
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "the configs are equal\n"
