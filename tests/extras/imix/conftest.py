"""Provide runs and a fake trainer for the tests of iMIX's hooks."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.imix import from_imix
from jengine.logging import MessageHub
from jengine.model import FunctionalModel
from jengine.runner import Runner


def linear_model():
    """Return a model y = w x with w = 0; for x = 1 and y = 1 the gradient of the loss is w - 1."""
    return FunctionalModel(
        init=lambda: {"w": jnp.zeros(())},
        loss=lambda params, batch: 0.5 * jnp.square(params["w"] * batch["x"] - batch["y"]),
        predict=lambda params, batch: params["w"] * batch["x"],
    )


def squared_error(predictions, batch):
    return jnp.square(predictions - batch["y"])


def make_ones(count):
    return ArrayDataset({"x": np.ones(count, np.float32), "y": np.ones(count, np.float32)})


@pytest.fixture
def imix_cfg(tmp_path):
    """Create a config in iMIX's style; by default with batches of 2, SGD with lr 0.5, and no validation."""

    def make(samples=8, **changes):
        return {
            "model": linear_model(),
            "work_dir": str(tmp_path / "run"),
            "train_data": dict(samples_per_gpu=2, data=make_ones(samples)),
            "optimizer": dict(type="SGD", lr=0.5),
            "checkpoint_config": dict(prefix="p", epoch_period=100),
            **({} if "max_iter" in changes else {"total_epochs": 1}),
            **changes,
        }

    return make


@pytest.fixture
def imix_runner(imix_cfg):
    """Create the Runner of a config in iMIX's style."""

    def make(samples=8, **changes):
        return Runner(**from_imix(imix_cfg(samples, **changes)))

    return make


@pytest.fixture
def test_data():
    return dict(
        samples_per_gpu=2, data=make_ones(4), post_processor=dict(metrics=[dict(type="MeanLoss", loss=squared_error)])
    )


@pytest.fixture
def trainer(tmp_path):
    """Create a fake Runner of a training by epochs of ten iterations each."""
    logs = []
    loop = types.SimpleNamespace(dataloader=range(10), by_epoch=True, epoch_length=10, epoch_start=0)

    class Trainer(types.SimpleNamespace):
        pass

    return Trainer(
        message_hub=MessageHub("fake"), iter=0, epoch=0, max_iters=10, max_epochs=1, train_loop=loop, hooks=[],
        work_dir=str(tmp_path), local_dir=str(tmp_path), param_schedulers=[], logs=logs, checkpointer=None,
        logger=types.SimpleNamespace(info=logs.append, warning=logs.append, error=logs.append),
    )  # fmt: skip
