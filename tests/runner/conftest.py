import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.model import FunctionalModel
from jengine.runner import Runner

TRUE_WEIGHT = np.array([1.0, -2.0], np.float32)


def linear_model():
    def predict(params, batch):
        return batch["x"] @ params["w"] + params["b"]

    return FunctionalModel(
        init=lambda: {"w": jnp.zeros((2,)), "b": jnp.zeros(())},
        loss=lambda params, batch: jnp.square(predict(params, batch) - batch["y"]),
        predict=predict,
    )


def squared_error(predictions, batch):
    return jnp.square(predictions - batch["y"])


def make_dataset(count):
    x = np.random.RandomState(0).randn(count, 2).astype(np.float32)
    return ArrayDataset(dict(x=x, y=x @ TRUE_WEIGHT))


def build_runner(work_dir, model=None, runner_class=Runner, validates=False, **changes):
    """Return a Runner of a linear regression, or what `changes` make of it: 16 samples, batches of 4, two epochs.

    It also validates each epoch where the test needs it, which is a program more to compile.
    """
    arguments = dict(
        train_dataloader=dict(batch_size=4, dataset=make_dataset(16)),
        train_cfg=dict(by_epoch=True, max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(checkpoint=None, logger=None),
    )
    if validates:
        arguments.update(
            val_dataloader=dict(batch_size=4, dataset=make_dataset(6)),
            val_cfg=dict(),
            val_evaluator=dict(type="MeanLoss", loss=squared_error),
        )
    return runner_class(linear_model() if model is None else model, work_dir, **{**arguments, **changes})


@pytest.fixture
def make_runner(tmp_path):
    """`build_runner`, by default in a directory of the test."""

    def make(work_dir=None, **changes):
        return build_runner(work_dir or tmp_path / "run", **changes)

    return make
