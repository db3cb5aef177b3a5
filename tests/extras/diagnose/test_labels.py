"""Test that labels out of range are named."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import MaskedTuple
from jengine.evaluation import Accuracy
from jengine.extras.diagnose.labels import find_wrong_labels
from jengine.model import CrossEntropy

LOGITS = jnp.zeros((3, 4))


def loss_of(**kwargs):
    return lambda batch: CrossEntropy(**kwargs)(LOGITS, batch)


def batch(*labels):
    return {"label": np.array(labels)}


def test_the_message_names_loss_range_entry_and_advice():
    assert find_wrong_labels(loss_of(), batch(0, 1, 3)) is None
    assert find_wrong_labels(loss_of(), batch(0, 1, 4)) == (
        "`CrossEntropy.label` must be class indices from 0 to 3, as the outputs have 4 classes, got 0 to 4 in the entry "
        "'label' of a batch; change the labels in the dataset, or give the model at least 5 outputs "
        "in `model.module`; set ignore_index=4 if this value marks what to leave out"
    )
    several = find_wrong_labels(loss_of(), batch(-1, 1, 4))
    assert "got -1 to 4 in the entry 'label' of a batch; `ignore_index` sets a value" in several


def test_ignored_labels_and_padding_are_allowed():
    loss = loss_of(ignore_index=255)
    assert find_wrong_labels(loss, batch(0, 255, 2)) is None
    padded = {"label": np.array([0, 9, 255], np.uint8), "mask": np.array([True, False, True])}
    assert find_wrong_labels(loss, padded) is None
    assert "from 0 to 3 or ignore_index=255, as " in find_wrong_labels(loss, batch(0, 255, 254))


def test_labels_of_pixels_in_tuples_are_found():
    logits = jnp.zeros((2, 3, 3, 4))
    labels = np.full((2, 3, 3), 255, np.uint8)
    loss = CrossEntropy(label="1.mask", ignore_index=255)
    step = lambda batch: loss(logits, batch)  # noqa: E731
    assert find_wrong_labels(step, (logits, {"mask": labels})) is None
    labels[1, 2, 0] = 7
    assert "got 7 to 7 in the entry '1.mask' of a batch" in find_wrong_labels(
        step, (logits, {"mask": labels})
    )


@pytest.mark.parametrize(
    "change", [lambda labels: labels - 1, lambda labels: jnp.asarray(labels) - 1]
)
def test_labels_that_the_step_changes_are_not_found(change):
    assert (
        find_wrong_labels(
            lambda batch: loss_of()({"label": change(batch["label"])}), batch(1, 2, 9)
        )
        is None
    )


def test_a_step_that_cannot_be_traced_finds_nothing():
    assert (
        find_wrong_labels(
            lambda batch: jax.lax.psum(loss_of()(batch)["loss"], "data"), batch(0, 1, 2)
        )
        is None
    )


def test_labels_under_differentiation_and_in_a_compiled_function_are_found():
    def step(batch):
        return jax.grad(lambda logits: jax.jit(CrossEntropy())(logits, batch)["loss"].sum())(LOGITS)

    def differentiate(batch):
        return jax.grad(lambda logits: CrossEntropy()(logits, batch)["loss"].sum())(LOGITS)

    assert "got 0 to 4" in find_wrong_labels(differentiate, batch(0, 0, 4))
    assert (
        find_wrong_labels(step, batch(0, 0, 4)) is None
    )  # there they are an argument, without values


def test_accuracy_is_nan_for_labels_out_of_range_and_leaves_out_ignore_index():
    metric = Accuracy(label=0, ignore_index=-1)

    def compute(*labels):
        batch = MaskedTuple((np.array(labels),), np.array([True, True, False]))
        update = jax.jit(lambda batch: metric.update(metric.init(), LOGITS, batch))
        message = find_wrong_labels(
            lambda batch: metric.update(metric.init(), LOGITS, batch), batch
        )
        return metric.compute(jax.device_get(update(batch)))["top1"], message

    assert compute(0, -1, 9) == (1.0, None)
    value, message = compute(0, 4, 1)
    assert np.isnan(value)
    assert message.startswith(
        "`Accuracy.label` must be class indices from 0 to 3 or ignore_index=-1"
    )
