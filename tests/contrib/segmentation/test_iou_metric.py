import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.contrib.segmentation import IoUMetric
from jengine.contrib.segmentation.iou_metric import Confusion
from jengine.evaluation import Evaluator

# One row of six pixels, classes 0 to 2, the last pixel ignored. Confusion: true 0 -> (2, 1, 0), true 1 -> (0, 1, 1).
LABELS = np.array([[[0, 0, 0, 1, 1, 255]]], np.int32)
FOUND = np.array([[[0, 0, 1, 1, 2, 2]]], np.int32)


def evaluate(metric, *batches):
    evaluator = Evaluator(metric)
    update = jax.jit(evaluator.update)
    state = evaluator.init()
    for predictions, batch in batches:
        state = update(state, predictions, batch)
    return evaluator.evaluate(state)


def test_the_three_numbers_of_a_small_map():
    found = evaluate(IoUMetric(num_classes=3), (FOUND, {"label": LABELS}))
    assert found["aAcc"] == pytest.approx(3 / 5)  # three of five pixels that count
    assert found["mIoU"] == pytest.approx((2 / 3 + 1 / 3 + 0 / 1) / 3)  # class 2 is predicted once, never right
    assert found["mAcc"] == pytest.approx((2 / 3 + 1 / 2) / 2)  # no pixel is of class 2


def test_classes_that_nothing_has_are_left_out_of_the_means():
    found = evaluate(IoUMetric(num_classes=9), (FOUND, {"label": LABELS}))
    assert found["mIoU"] == pytest.approx((2 / 3 + 1 / 3 + 0) / 3)


def test_logits_count_as_their_largest_and_batches_add_up():
    rng = np.random.RandomState(0)
    logits = rng.randn(6, 4, 5, 3).astype(np.float32)
    labels = rng.randint(0, 3, (6, 4, 5)).astype(
        np.uint8
    )  # 3 * 4 + 2 fits uint8, a product with more classes would not
    whole = evaluate(IoUMetric(num_classes=3), (logits, {"label": labels}))
    parts = [(logits[i : i + 2], {"label": labels[i : i + 2]}) for i in (0, 2, 4)]
    assert evaluate(IoUMetric(num_classes=3), *parts) == whole
    assert whole["aAcc"] == pytest.approx((logits.argmax(-1) == labels).mean())


def test_padded_rows_do_not_count():
    labels, found = np.concatenate([LABELS, LABELS]), np.concatenate([FOUND, LABELS % 255])
    batch = {"label": labels, "mask": np.array([True, False])}
    assert evaluate(IoUMetric(num_classes=3), (found, batch)) == evaluate(
        IoUMetric(num_classes=3), (FOUND, {"label": LABELS})
    )


def test_a_prediction_that_is_no_class_is_wrong_and_of_no_class():
    found = evaluate(IoUMetric(num_classes=2), (np.array([[[0, 7]]]), {"label": np.array([[[0, 1]]])}))
    assert found == {"aAcc": 0.5, "mIoU": 0.5, "mAcc": 0.5}  # class 0 is perfect, class 1 is never found


def test_counts_beyond_32_bits_stay_exact():
    metric = IoUMetric(num_classes=2)
    full = metric.init()._replace(low=jnp.full((2, 3), 2**32 - 1, jnp.uint32))
    state = metric.update(full, jnp.array([[[0, 0]]]), {"label": jnp.array([[[0, 0]]])})
    assert isinstance(state, Confusion)
    assert int(state.low[0, 0]) == 1
    assert int(state.high[0, 0]) == 1
    assert int(state.high[1, 1]) == 0


def test_the_number_of_classes_comes_from_the_dataset():
    metric = IoUMetric()
    with pytest.raises(ValueError, match="give num_classes, or a dataset whose metainfo"):
        metric.init()
    metric.dataset_meta = {"classes": ("road", "sky", "tree")}
    assert metric.init().low.shape == (3, 4)


def test_what_does_not_belong_together_is_refused():
    metric = IoUMetric(num_classes=3)
    with pytest.raises(ValueError, match=r"found predictions float32\[1, 1, 6, 4\] and labels int32\[1, 1, 6\]"):
        metric.update(metric.init(), jnp.zeros((1, 1, 6, 4)), {"label": LABELS})
    with pytest.raises(KeyError, match="did you mean 'label'"):
        IoUMetric(num_classes=3, label="labels").update(metric.init(), FOUND, {"label": LABELS})
    with pytest.raises(KeyError, match="say which entry with prediction="):
        metric.update(metric.init(), {"seg": FOUND}, {"label": LABELS})
    with pytest.raises(ValueError, match="at least 2"):
        IoUMetric(num_classes=1)


def test_the_values_by_class_are_logged(tmp_path):
    from jengine.logging import build_logger

    build_logger(log_file=str(tmp_path / "run.log"))
    metric = IoUMetric()
    metric.dataset_meta = {"classes": ("road", "sky", "tree")}
    evaluate(metric, (FOUND, {"label": LABELS}))
    metric.num_classes = 4  # more than have names
    evaluate(metric, (FOUND, {"label": LABELS}))
    text = (tmp_path / "run.log").read_text()
    assert "road" in text
    assert "0.6667" in text
