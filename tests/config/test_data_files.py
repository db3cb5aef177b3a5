"""Test configs in JSON and YAML, attributes within lists, differences, and names of PyTorch classes."""

import json

import pytest

from jengine.cli import main
from jengine.config import diff_configs, dump_config, load_config, resolve, write_config
from jengine.config.errors import ConfigError

CFG = {
    "train_cfg": {"by_epoch": True, "max_epochs": 3},
    "custom_hooks": [{"type": "EMAHook", "momentum": 2e-4, "inner": [{"value": 1}]}],
    "optim_wrapper": {"optimizer": {"type": "AdamW", "lr": 1e-3, "eps": float("inf")}},
}


@pytest.mark.parametrize("suffix", ["json", "yaml", "yml"])
def test_a_config_is_written_and_read_as_json_and_yaml(tmp_path, suffix):
    write_config(CFG, tmp_path / f"cfg.{suffix}")
    loaded = load_config(tmp_path / f"cfg.{suffix}", ["train_cfg.max_epochs=4", "custom_hooks[0].momentum=0.5"])
    assert resolve(loaded) == {
        **CFG,
        "train_cfg": {"by_epoch": True, "max_epochs": 4},
        "custom_hooks": [{"type": "EMAHook", "momentum": 0.5, "inner": [{"value": 1}]}],
    }


def test_json_and_yaml_files_inherit(write):
    write("base.yaml", "train_cfg: {max_epochs: 3}\nlr: 0.1\nwork_dir: 'runs/{{ fileBasenameNoExtension }}'\n")
    child = dict(
        _base_="base.yaml", train_cfg=dict(val_interval=2), optim_wrapper=dict(optimizer=dict(lr="{{_base_.lr}}"))
    )
    path = write("child.json", json.dumps(child))
    cfg = resolve(load_config(path))
    assert cfg["train_cfg"] == {"max_epochs": 3, "val_interval": 2}
    assert cfg["optim_wrapper"]["optimizer"]["lr"] == 0.1
    assert cfg["work_dir"] == "runs/base"
    flat = write("flat.py", "_base_ = ['child.json']\ntrain_cfg = dict(max_epochs=_base_.train_cfg.max_epochs + 1)\n")
    assert load_config(flat).train_cfg.max_epochs == 4


def test_files_that_are_no_dict_or_of_another_kind_are_errors(write):
    with pytest.raises(ConfigError, match=r"a config file must contain a dict, got list in .*a\.json"):
        load_config(write("a.json", "[1]"))
    with pytest.raises(ConfigError, match="a config must be a Python file, or JSON or YAML, got"):
        load_config(write("a.toml", "x = 1"))


def test_the_modules_of_classes_are_listed_in_json_too(write, tmp_path):
    write("own_parts.py", "class Part: pass\n")
    path = write("own.py", "import own_parts\ndef get_config():\n    return dict(model=dict(type=own_parts.Part))\n")
    cfg = load_config(path)
    write_config(cfg, tmp_path / "run" / "config.json")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["CONFIG_MODULES"] == {"..": ["own_parts"]}
    assert resolve(load_config(tmp_path / "run" / "config.json")) == {"model": {"type": "own_parts.Part"}}
    assert "own_parts.Part" in dump_config(cfg, tmp_path / "run" / "config.yaml")


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
    write_config(other, tmp_path / "b.yaml")
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "b.yaml"), "--config.train_cfg.max_epochs=5"]) == 0
    rows = [
        [cell.strip() for cell in line.split("|")[1:-1]] for line in capsys.readouterr().out.splitlines() if "|" in line
    ]
    assert ["train_cfg.max_epochs", "3", "5"] in rows
    assert ["custom_hooks[0].inner[0].value", "1", ""] in rows
    assert main(["diff", str(tmp_path / "a"), str(tmp_path / "a")]) == 0
    assert capsys.readouterr().out == "the configs are equal\n"


def test_names_of_pytorch_are_imported_in_every_form(write):
    path = write(
        "new_style.py",
        """
        import os, torch
        import torch.nn as nn
        from torch import optim
        from torch.optim import SGD

        model = dict(type=nn.ReLU, act=torch.nn.GELU)
        optim_wrapper = dict(optimizer=dict(type=torch.optim.AdamW, other=optim.Adam, last=SGD))
        work_dir = os.sep
        """,
    )
    cfg = resolve(load_config(path))
    assert cfg["model"] == {"type": "ReLU", "act": "GELU"}
    assert cfg["optim_wrapper"]["optimizer"] == {"type": "AdamW", "other": "Adam", "last": "SGD"}
    assert type(cfg["model"]["type"]) is str
    called = write("called.py", "import torch\nmodel = dict(size=torch.cuda.device_count())\n")
    with pytest.raises(ConfigError, match="a config can name 'device_count' of PyTorch, not call it"):
        load_config(called)


@pytest.mark.parametrize("suffix", ["json", "yaml"])
def test_a_file_that_is_nested_too_deeply_is_refused(tmp_path, suffix):
    (tmp_path / f"deep.{suffix}").write_text("[" * 20_000)
    with pytest.raises(ConfigError, match="a config file must not be nested so deeply, got "):
        load_config(tmp_path / f"deep.{suffix}")
