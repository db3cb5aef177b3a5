"""Test that a config names all optional packages that it requires and that are not installed."""

import pathlib
import sys

import pytest

from jengine.cli import main
from jengine.extras.diagnose.missing_packages import check_packages

DIGITS = str(pathlib.Path(__file__).parents[3] / "configs" / "digits_cnn.py")


@pytest.fixture(autouse=True)
def without_extras(monkeypatch):
    """Have Python find none of the optional packages."""
    for name in ("tensorboard", "sklearn", "PIL", "wandb", "safetensors"):
        monkeypatch.setitem(sys.modules, name, None)


def test_all_missing_packages_of_a_config_are_one_line_before_anything_starts(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", DIGITS]) == 2
    out, error = capsys.readouterr()
    assert out == ""
    assert error == (
        "jengine: MissingPackageError: the config requires packages that are not installed: "
        "sklearn (for `test_dataloader.dataset`), tensorboard (for `visualizer.vis_backends[1]`); "
        "install all of them with: pip install 'jengine[examples,tensorboard]'\n"
    )
    assert list(tmp_path.iterdir()) == []


def test_a_name_that_is_not_a_type_of_jengine_requires_nothing():
    class Digits:
        pass

    check_packages(dict(experiment_name="Kmeans", vars=dict(name="Kmeans"), load_from="epoch_1"))
    check_packages(dict(train_dataloader=dict(dataset=dict(type=Digits))))
