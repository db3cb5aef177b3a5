"""Test that a config names all optional packages that it requires and that are not installed."""

import pathlib
import sys

import pytest

from jengine.cli import main
from jengine.config.errors import MissingPackageError
from jengine.config.extras import check_extras

DIGITS = str(pathlib.Path(__file__).parents[2] / "configs" / "digits_cnn.py")


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


@pytest.mark.parametrize(
    ("cfg", "extra"),
    [
        (dict(visualizer="LocalVisualizer"), "draw"),
        (dict(visualizer=dict(vis_backends=["WandbVisBackend"])), "wandb"),
        (dict(custom_hooks=[dict(type="mmseg.SegVisualizationHook")]), "draw"),
        (dict(custom_hooks=[dict(type="DeepClusterHook", clustering=dict(type="PIC"))]), "examples"),
        (dict(load_from="vit.safetensors"), "safetensors"),
        (dict(load_from=dict(path=pathlib.Path("vit.safetensors"))), "safetensors"),
    ],
)
def test_types_bare_names_and_weights_require_packages(cfg, extra):
    with pytest.raises(MissingPackageError, match=rf"pip install 'jengine\[{extra}\]'"):
        check_extras(cfg)


def test_a_name_that_is_not_a_type_of_jengine_requires_nothing():
    class Digits:
        pass

    check_extras(dict(experiment_name="Kmeans", vars=dict(name="Kmeans"), load_from="epoch_1"))
    check_extras(dict(train_dataloader=dict(dataset=dict(type=Digits))))
