import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import MaskedTuple
from jengine.model import CrossEntropy, MeanSquaredError
from jengine.train.losses import total_loss
from tests.refusals import check_refusal

LOGITS = np.log(np.array([[0.7, 0.2, 0.1], [0.3, 0.6, 0.1]], np.float32))
LABELS = np.array([0, 2])
VALUES = [-np.log(0.7), -np.log(0.1)]


@pytest.mark.parametrize(
    ("loss", "outputs", "batch"),
    [
        (CrossEntropy(label=1), LOGITS, (None, LABELS)),
        (CrossEntropy(label=1, output=0), (LOGITS, {"pre_logits": LOGITS}), [None, LABELS]),
        (CrossEntropy(label="target.class", output="heads.0"), {"heads": [LOGITS]}, {"target": {"class": LABELS}}),
    ],
)
def test_outputs_and_labels_are_chosen_by_index_or_path(loss, outputs, batch):
    np.testing.assert_allclose(loss(outputs, batch)["loss"], VALUES, rtol=1e-6)


def test_soft_labels_have_the_loss_of_their_expectation():
    one_hot = np.eye(3, dtype=np.float32)[LABELS]
    for smoothing in (0.0, 0.3):
        loss = CrossEntropy(label_smoothing=smoothing)
        hard = loss(LOGITS, {"label": LABELS})["loss"]
        np.testing.assert_allclose(loss(LOGITS, {"label": one_hot})["loss"], hard, rtol=1e-6)
    mixed = CrossEntropy()(LOGITS, {"label": 0.75 * one_hot + 0.25 * one_hot[::-1]})["loss"]
    np.testing.assert_allclose(mixed[0], -0.75 * np.log(0.7) - 0.25 * np.log(0.1), rtol=1e-6)


def test_the_squared_error_of_an_entry():
    loss = MeanSquaredError(target=1, output="mean")
    np.testing.assert_array_equal(loss({"mean": jnp.ones((2, 3))}, (0, np.zeros((2, 3))))["loss"], [1.0, 1.0])


@pytest.mark.parametrize(
    ("loss", "batch", "words"),
    [
        (
            CrossEntropy(),
            {"label": LABELS[:, None]},
            ["f32", "[2,3]", "got 'label', i64[2,1]"],
        ),
        (CrossEntropy(), {"label": np.zeros((2, 4), np.float32)}, ["class indices", "got 'label', f32"]),
        (CrossEntropy(ignore_index=0), {"label": np.zeros((2, 3), np.float32)}, ["ignore_index", "got 'label'"]),
        (
            MeanSquaredError(),
            {"target": LABELS},
            ["f32", "[2,3]", "got 'target', i64[2]"],
        ),
    ],
)
def test_targets_of_another_shape_or_dtype_raise(loss, batch, words):
    check_refusal(lambda: loss(LOGITS, batch), ValueError, *words)


@pytest.mark.parametrize("label", [-1, 3, 255])
def test_a_label_outside_the_classes_has_the_loss_nan_and_no_gradient(label):
    batch = {"label": np.array([0, label])}
    np.testing.assert_allclose(CrossEntropy()(LOGITS, batch)["loss"], [VALUES[0], np.nan], rtol=1e-6)
    grads = jax.grad(lambda logits: CrossEntropy()(logits, batch)["loss"].sum())(LOGITS)
    assert np.isfinite(grads).all()
    assert not grads[1].any()


def test_ignored_examples_have_no_loss_and_no_weight():
    loss = CrossEntropy(ignore_index=255, label_smoothing=0.0)
    for labels in (np.array([0, 255], np.uint8), np.array([0, 255])):
        total, weight = loss(LOGITS, {"label": labels})["loss"]
        assert weight == 1.0
        np.testing.assert_allclose(total, VALUES[0], rtol=1e-6)
    total, weight = loss(LOGITS, {"label": np.array([255, 255])})["loss"]
    assert total_loss({"loss": (total, weight)})[0] == 0.0  # a batch where nothing counts


def test_other_labels_outside_the_classes_stay_nan_with_ignore_index():
    assert np.isnan(CrossEntropy(ignore_index=-100)(LOGITS, {"label": np.array([0, 3])})["loss"][0])


def test_pixels_are_ignored_and_padding_does_not_count():
    logits = np.log(np.array([[0.5, 0.5], [0.25, 0.75]], np.float32))[[[0, 1], [0, 1]]]  # [2, 2, 2]
    labels = np.array([[0, 255], [0, 0]])
    loss = CrossEntropy(label=1, ignore_index=255)
    total, weight = loss(logits, (None, labels))["loss"]
    assert weight == 3.0
    np.testing.assert_allclose(total, -np.log([0.5, 0.5, 0.25]).sum(), rtol=1e-6)
    total, weight = loss(logits, MaskedTuple((None, labels), np.array([True, False])))["loss"]
    assert weight == 1.0
    np.testing.assert_allclose(total, -np.log(0.5), rtol=1e-6)
