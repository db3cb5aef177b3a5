"""The code in docs/selfsup.md runs."""

import pathlib
import re

import numpy as np
import pytest

PAGE = (pathlib.Path(__file__).parents[3] / "docs" / "selfsup.md").read_text()
BLOCKS = re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL)


def test_the_first_example_turns_on_its_dense_loss(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}
    exec(compile(BLOCKS[0], "selfsup.md", "exec"), names)
    assert float(names["runner"].hyperparams["loss_lambda"]) == 0.5
    assert names["runner"].programs.update.traces == 1


def test_the_example_of_the_visualizer_writes_a_picture(tmp_path, monkeypatch):
    image_module = pytest.importorskip("PIL.Image")
    (block,) = [block for block in BLOCKS if "SelfSupVisualizer" in block]
    monkeypatch.chdir(tmp_path)
    exec(compile(block, "selfsup.md", "exec"), {"np": np})
    picture = image_module.open(tmp_path / "work_dirs" / "masks" / "vis_data" / "vis_image" / "first_1.png")
    assert picture.size == (64, 32)
