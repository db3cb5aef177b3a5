"""Test configs in JSON and YAML, and names of PyTorch classes."""

import json

import pytest

from jengine.config import dump_config, load_config, resolve, write_config
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


def test_the_modules_of_classes_are_listed_in_json_too(write, tmp_path):
    write("own_parts.py", "class Part: pass\n")
    path = write("own.py", "import own_parts\ndef get_config():\n    return dict(model=dict(type=own_parts.Part))\n")
    cfg = load_config(path)
    write_config(cfg, tmp_path / "run" / "config.json")
    assert json.loads((tmp_path / "run" / "config.json").read_text())["CONFIG_MODULES"] == {"..": ["own_parts"]}
    assert resolve(load_config(tmp_path / "run" / "config.json")) == {"model": {"type": "own_parts.Part"}}
    assert "own_parts.Part" in dump_config(cfg, tmp_path / "run" / "config.yaml")


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
