"""Tests for the path in a config of an argument that an error names by its class."""

import pytest

from jengine.config.explain import explained
from jengine.extras.diagnose.locate import locate_argument
from jengine.hooks import CheckpointHook

CFG = dict(
    model=dict(type="LinenModel", loss=dict(type="jengine.model.CrossEntropy", label="y")),
    custom_hooks=[dict(type="EMAHook"), dict(type=CheckpointHook, save_best="auto")],
    val_evaluator=[dict(type="Accuracy"), dict(type="Accuracy", label="y")],
)


@pytest.mark.parametrize(
    ("argument", "path"),
    [
        ("CrossEntropy.label", "model.loss.label"),
        ("CrossEntropy.output", "model.loss"),  # not in the config: its default was used
        ("CheckpointHook.save_best", "custom_hooks[1].save_best"),
        ("Accuracy.label", None),  # either of two
        ("MeanSquaredError.target", None),
    ],
)
def test_an_argument_has_the_path_of_the_only_section_with_its_class(argument, path):
    assert locate_argument(CFG, argument) == path
    with pytest.raises(ValueError, match="must be") as error, explained(cfg=CFG):
        raise ValueError(f"`{argument}` must be an entry of the batch")
    assert getattr(error.value, "__notes__", []) == ([f"in the config at `{path}`"] if path else [])
