"""Check that the configs of jengine are found in every directory."""

import pathlib

import pytest

from jengine.config import load_config, resolve
from jengine.config.errors import ConfigError

CONFIGS = pathlib.Path(__file__).parent.parent.parent / "configs"


def test_a_config_that_jengine_ships_loads_in_an_empty_directory(tmp_path, monkeypatch, caplog):
    monkeypatch.chdir(tmp_path)
    cfg = load_config("configs/digits_cnn.py", ["train_cfg.max_epochs=3"])
    assert cfg.train_cfg.max_epochs == 3
    assert resolve(cfg) == resolve(load_config(CONFIGS / "digits_cnn.py", ["train_cfg.max_epochs=3"]))
    assert caplog.messages == [
        "configs/digits_cnn.py does not exist in this directory; using the config of this name that jengine ships."
    ]


def test_a_file_of_the_user_comes_before_the_one_that_jengine_ships(write, tmp_path, monkeypatch, caplog):
    write("configs/digits_cnn.py", "def get_config():\n    return dict(lr=0.5)")
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/digits_cnn.py").lr == 0.5
    assert not caplog.messages


def test_a_directory_in_place_of_a_config_is_an_error(tmp_path, monkeypatch):
    (tmp_path / "configs" / "lm.py").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    with pytest.raises((FileNotFoundError, ConfigError)):
        load_config("configs/lm.py")
