"""The code of the models page for Haiku trains, resumes and is at most ten lines."""

import pathlib
import re

import jax
import numpy as np
import pytest

from jengine.config import paths
from jengine.data import ArrayDataset
from jengine.model import CrossEntropy, FunctionalModel
from tests.runner.conftest import build_runner

pytestmark = pytest.mark.foreign

IMAGES = np.random.RandomState(0).randn(16, 6).astype(np.float32)
LABELS = (IMAGES[:, 0] > 0).astype(np.int32)


def run_block(library, **names):
    """Run the block of the page that imports a library, and return its names."""
    page = (pathlib.Path(__file__).parents[2] / "docs" / "model.md").read_text()
    blocks = re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(f"import {library} ")]
    assert len([line for line in block.splitlines()[1:] if line.strip()]) <= 10
    names.update(jax=jax, paths=paths, FunctionalModel=FunctionalModel, CrossEntropy=CrossEntropy)
    exec(compile(block, f"{library} in model.md", "exec"), names)
    return names


def train(model, work_dir, epochs, **changes):
    data = dict(batch_size=8, dataset=ArrayDataset(dict(image=IMAGES, label=LABELS)))
    runner = build_runner(
        work_dir,
        model,
        train_dataloader=data,
        train_cfg=dict(by_epoch=True, max_epochs=epochs),
        optim_wrapper=dict(optimizer=dict(type="AdamW", lr=0.1, weight_decay=0.01)),
        val_dataloader=data,
        val_cfg=dict(),
        val_evaluator=dict(type="Accuracy"),
        custom_hooks=[dict(type="EMAHook", momentum=0.5)],
        randomness=dict(seed=0),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=4), logger=None),
        **changes,
    )
    runner.train()
    return runner


def check_resume(model, tmp_path):
    """Check that a run in two parts equals one without interruption, and return it."""
    whole = train(model, tmp_path / "whole", 8)
    train(model, tmp_path / "parts", 4)
    parts = train(model, tmp_path / "parts", 8, resume=True)
    jax.tree.map(np.testing.assert_array_equal, whole.state.params, parts.state.params)
    jax.tree.map(np.testing.assert_array_equal, whole.state.model_state, parts.state.model_state)
    assert whole.validations[-1][2]["accuracy/top1"] > 0.85
    return whole


def test_haiku_network_with_state_trains(tmp_path):
    hk = pytest.importorskip("haiku")

    def forward(x, train):
        x = hk.BatchNorm(True, True, 0.5)(hk.Linear(8)(x), train)
        x = hk.dropout(hk.next_rng_key(), 0.1, x) if train else x
        return hk.Linear(2)(jax.nn.relu(x))

    runner = check_resume(run_block("haiku", forward=forward)["model"], tmp_path)
    assert "linear.w" in paths.flatten(runner.state.params)
    assert runner.state.model_state  # the running statistics
