import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.evaluation import Evaluator
from jengine.extras.metrics import IoUMetric
from jengine.extras.metrics.classification import Counts

# Six pixels of classes 0 to 2, the last one ignored. Confusion: true 0 -> (2, 1, 0), true 1 -> (0, 1, 1).
LABELS = np.array([[[0, 0, 0, 1, 1, 255]]], np.int32)
PREDICTED = np.array([[[0, 0, 1, 1, 2, 2]]], np.int32)


def evaluate(metric, *batches):
    evaluator = Evaluator(metric)
    update = jax.jit(evaluator.update)
    state = evaluator.init()
    for predictions, batch in batches:
        state = update(state, predictions, batch)
    return evaluator.evaluate(state)


def test_the_three_metrics_of_a_small_image():
    metrics = evaluate(IoUMetric(num_classes=3), (PREDICTED, {"label": LABELS}))
    assert metrics["aAcc"] == pytest.approx(3 / 5)  # three of the five pixels that are not ignored
    assert metrics["mIoU"] == pytest.approx((2 / 3 + 1 / 3 + 0 / 1) / 3)  # class 2 is predicted once, wrongly
    assert metrics["mAcc"] == pytest.approx((2 / 3 + 1 / 2) / 2)  # class 2 does not occur in the labels


def test_dice_and_f_score_are_means_over_the_classes_too():
    metric = IoUMetric(num_classes=3, iou_metrics=["mDice", "mFscore"])
    metrics = evaluate(metric, (PREDICTED, {"label": LABELS}))
    assert metrics == pytest.approx(
        dict(
            aAcc=3 / 5,
            mDice=(4 / 5 + 2 / 4 + 0 / 1) / 3,
            mAcc=(2 / 3 + 1 / 2) / 2,
            mFscore=(4 / 5 + 2 / 4) / 2,  # class 2 has no labels, and no recall
            mPrecision=(2 / 2 + 1 / 2 + 0 / 1) / 3,
            mRecall=(2 / 3 + 1 / 2) / 2,
        )
    )
    assert evaluate(IoUMetric(num_classes=3, iou_metrics="mDice"), (PREDICTED, {"label": LABELS})).keys() == {
        "aAcc", "mDice", "mAcc",
    }  # fmt: skip


def test_classes_that_do_not_occur_are_left_out_of_the_means():
    metrics = evaluate(IoUMetric(num_classes=9), (PREDICTED, {"label": LABELS}))
    assert metrics["mIoU"] == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)


def test_logits_count_as_their_argmax_and_batches_add_up():
    rng = np.random.RandomState(0)
    logits = rng.randn(6, 4, 5, 3).astype(np.float32)
    labels = rng.randint(0, 3, (6, 4, 5)).astype(np.uint8)
    metrics = evaluate(IoUMetric(num_classes=3), (logits, {"label": labels}))
    parts = [(logits[i : i + 2], {"label": labels[i : i + 2]}) for i in (0, 2, 4)]
    assert evaluate(IoUMetric(num_classes=3), *parts) == metrics
    assert metrics["aAcc"] == pytest.approx((logits.argmax(-1) == labels).mean())


def test_padded_examples_do_not_count():
    labels, predicted = np.concatenate([LABELS, LABELS]), np.concatenate([PREDICTED, LABELS % 255])
    batch = {"label": labels, "mask": np.array([True, False])}
    assert evaluate(IoUMetric(num_classes=3), (predicted, batch)) == evaluate(
        IoUMetric(num_classes=3), (PREDICTED, {"label": LABELS})
    )


def test_a_prediction_of_an_invalid_class_is_wrong_and_counts_for_no_class():
    metrics = evaluate(IoUMetric(num_classes=2), (np.array([[[0, 7]]]), {"label": np.array([[[0, 1]]])}))
    assert metrics == {"aAcc": 0.5, "mIoU": 0.5, "mAcc": 0.5}  # class 0 is perfect, class 1 is never predicted


def test_a_label_of_an_invalid_class_gives_nan():
    metrics = evaluate(IoUMetric(num_classes=2), (np.array([[[0, 1]]]), {"label": np.array([[[0, 2]]])}))
    assert np.isnan(list(metrics.values())).all()


def test_counts_beyond_32_bits_stay_exact():
    metric = IoUMetric(num_classes=2)
    full = Counts(jnp.full((2, 3), 2**32 - 1, jnp.uint32), jnp.zeros((2, 3), jnp.uint32))
    state = metric.update(metric.init()._replace(counts=full), jnp.array([[[0, 0]]]), {"label": jnp.array([[[0, 0]]])})
    counts = state.counts.value()
    assert counts[0, 0] == 2**32 + 1
    assert counts[1, 1] == 2**32 - 1


def test_the_number_of_classes_comes_from_the_dataset():
    metric = IoUMetric()
    with pytest.raises(ValueError, match="`num_classes` must be given unless the dataset's metainfo"):
        metric.init()
    metric.dataset_meta = {"classes": ("road", "sky", "tree")}
    assert metric.init().counts.low.shape == (3, 4)


def test_the_values_of_each_class_are_logged(tmp_path):
    from jengine.logging import build_logger

    build_logger(log_file=str(tmp_path / "run.log"))
    metric = IoUMetric()
    metric.dataset_meta = {"classes": ("road", "sky", "tree")}
    evaluate(metric, (PREDICTED, {"label": LABELS}))
    metric.num_classes = 4  # more classes than names
    evaluate(metric, (PREDICTED, {"label": LABELS}))
    text = (tmp_path / "run.log").read_text()
    assert "road" in text
    assert "0.6667" in text
