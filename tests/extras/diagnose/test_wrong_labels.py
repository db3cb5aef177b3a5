"""Test that a loss which is not finite is explained by the labels, or else by what is often the cause."""

import flax.linen as nn
import jax.numpy as jnp
import numpy as np
import pytest

from jengine import checkpoint
from jengine.data import ArrayDataset
from jengine.extras.diagnose.labels import find_wrong_labels
from jengine.extras.diagnose.wrong_labels import describe_labels
from jengine.hooks import NonFiniteLossError
from jengine.model import CrossEntropy, FunctionalModel
from tests.refusals import check_refusal


def classifier():
    def predict(params, batch):
        return batch["x"] @ params["w"]

    return FunctionalModel(
        init=lambda: {"w": jnp.zeros((2, 3))},
        loss=lambda params, batch: CrossEntropy()(predict(params, batch), batch),
        predict=predict,
    )


def labelled(*labels):
    return dict(
        dataset=ArrayDataset(dict(x=np.ones((len(labels), 2), np.float32), label=np.array(labels))),
        batch_size=2,
        sampler=dict(type="DefaultSampler", shuffle=False),
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        dict(train_cfg=dict(max_epochs=1, steps_per_call=2)),
        dict(parallel=dict(type="Pjit", devices=2)),
    ],
)
@pytest.mark.parametrize("interval", [1, 50])
def test_training_ends_with_the_range_of_the_labels_and_the_advice(make_runner, changes, interval):
    arguments = dict(
        model=classifier(),
        train_dataloader=labelled(0, 1, 2, 0, 1, 3, 0, 0),  # the batch of iteration 2 is wrong, the last one is not
        train_cfg=dict(max_epochs=1),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=interval)),  # saves each epoch
    )  # fmt: skip
    runner = make_runner(**{**arguments, **changes})
    words = "from 0 to 2", "got 1 to 3 in the entry 'label'", "`train_dataloader.dataset`", "at least 4 outputs", "ignore_index=3"
    check_refusal(runner.train, NonFiniteLossError, "the loss of iteration 2", "`CrossEntropy.label`", *words)
    assert checkpoint.find_latest(runner.work_dir) is None


def test_the_numerics_guard_names_the_labels_too(make_runner):
    runner = make_runner(
        model=classifier(),
        train_dataloader=labelled(0, 1, 3, 0, 3, 3, 0, 3),
        train_cfg=dict(max_epochs=1),
        custom_hooks=[dict(type="NumericsGuardHook", max_in_row=2, interval=1)],
    )  # fmt: skip
    check_refusal(runner.train, FloatingPointError, "were dropped", "`CrossEntropy.label`", "from 0 to 2")
    assert runner.iter == 2


class MLP(nn.Module):
    features: int


def test_the_message_names_the_setting_with_the_number_of_outputs():
    labels = find_wrong_labels(
        lambda batch: CrossEntropy()(np.zeros((3, 4)), batch), {"label": np.array([0, 1, 4])}
    )

    def describe(**module):
        return describe_labels(labels, dict(model=dict(module=module)))

    assert "or give the model at least 5 outputs in `model.module`; set ignore_index=4" in describe(type=MLP, features=16)
    of_a_run = describe(type="flax.linen.Dense", features=4)
    assert (
        "or give the model at least 5 outputs by `model.module.features`, now 4; set ignore_index=4"
        in of_a_run
    )
