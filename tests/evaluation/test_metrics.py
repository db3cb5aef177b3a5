import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import METRICS, MODELS
from jengine.evaluation import Accuracy, BaseMetric, HostMetric, MeanLoss
from jengine.evaluation.metric import Sum
from tests.refusals import check_refusal

# Ranks of the true class, counted by hand: 0, 1, 2 and, since equal logits rank by class index, 1.
LOGITS = np.array([[5, 1, 0], [5, 9, 0], [1, 2, 0], [3, 3, 0]], np.float32)
LABELS = np.array([0, 0, 2, 1], np.int32)


def compute(metric, predictions, batch):
    state = jax.jit(metric.update)(metric.init(), predictions, batch)
    return metric.compute(jax.device_get(state))


def test_accuracy_counts_examples_with_the_true_class_among_the_top_k():
    assert compute(Accuracy(topk=(1, 2, 3)), LOGITS, {"label": LABELS}) == {"top1": 0.25, "top2": 0.75, "top3": 1.0}


def test_accuracy_matches_argmax_for_equal_logits():
    logits = np.random.RandomState(0).randint(0, 3, (200, 5)).astype(np.float32)
    labels = np.random.RandomState(1).randint(0, 5, 200)
    got = compute(Accuracy(), logits, {"label": labels})["top1"]
    assert got == (logits.argmax(axis=1) == labels).mean()


def test_padding_does_not_count():
    batch = {"label": LABELS, "mask": np.array([True, True, False, False])}
    assert compute(Accuracy(topk=(1, 2)), LOGITS, batch) == {"top1": 0.5, "top2": 1.0}


def test_accuracy_counts_each_token_that_has_a_label():
    logits = np.stack([LOGITS, LOGITS[::-1]])  # (2, 4, 3): two rows of four tokens
    labels = np.stack([LABELS, [-1, 2, 0, 0]])  # ranks 0, 1, 2, 1 and none, 2, 1, 0
    metric = Accuracy(topk=(1, 2), ignore_index=-1)
    assert compute(metric, logits, {"label": labels}) == {"top1": 2 / 7, "top2": 5 / 7}
    mask = np.array([False, True])
    assert compute(metric, logits, {"label": labels, "mask": mask}) == {"top1": 1 / 3, "top2": 2 / 3}
    assert compute(Accuracy(ignore_index=-1), logits.argmax(-1), {"label": labels}) == {"top1": 2 / 7}
    assert math.isnan(compute(Accuracy(), logits, {"label": labels})["top1"])


def test_predictions_can_be_class_indices():
    assert compute(Accuracy(), np.array([0, 1, 2, 2]), {"label": LABELS}) == {"top1": 0.5}


def test_entries_are_chosen_by_name():
    metric = Accuracy(label="target", prediction="logits")
    assert compute(metric, {"logits": LOGITS, "other": 0}, {"target": LABELS})["top1"] == 0.25


def test_nan_logits_count_as_wrong_and_illegal_labels_give_nan():
    logits = LOGITS.copy()
    logits[0, 2] = np.nan
    assert compute(Accuracy(), logits, {"label": np.array([0, 1, 2, 1])}) == {"top1": 0.25}
    assert math.isnan(compute(Accuracy(), logits, {"label": np.array([0, 1, -1, 3])})["top1"])
    assert math.isnan(compute(Accuracy(), logits, {"label": np.array([0, 1, 2, 4])})["top1"])


def test_minus_infinity_is_a_valid_logit():
    logits = np.array([[-np.inf, 0.0], [-np.inf, 0.0]], np.float32)
    assert compute(Accuracy(topk=(1, 2)), logits, {"label": np.array([1, 0])}) == {"top1": 0.5, "top2": 1.0}


@pytest.mark.parametrize(
    ("metric", "predictions", "batch", "error", "words"),
    [
        (
            Accuracy(topk=(5,)),
            LOGITS,
            {"label": LABELS},
            ValueError,
            ["`Accuracy.topk`", "f32", "[4,3]", "got (5,)"],
        ),
        (
            Accuracy(topk=(2,)),
            LABELS,
            {"label": LABELS},
            ValueError,
            ["`Accuracy.topk`", "i32"],
        ),
        (
            Accuracy(),
            LOGITS,
            {"labels": LABELS},
            KeyError,
            ["`Accuracy.label`", "got 'label'", "i32", "[4]"],
        ),
        (
            Accuracy(),
            {"logit": LOGITS},
            {"label": LABELS},
            KeyError,
            ["`Accuracy.prediction`", "got None", "f32"],
        ),
        (Accuracy(), LOGITS, {"label": np.eye(3)[LABELS]}, ValueError, ["got f32[4,3] and f32[4,3]"]),
        (Accuracy(), LOGITS, {"label": LABELS[:3]}, ValueError, ["i32", "[3]"]),
        (Accuracy(), LOGITS, {"label": LABELS / 2}, ValueError, ["[B, ...]", "got f32[4,3] and f32[4]"]),
        (
            Accuracy(),
            LOGITS,
            {"label": LABELS, "mask": np.ones((4, 1))},
            ValueError,
            ["`mask`"],
        ),
    ],
)
def test_accuracy_rejects_illegal_batches_and_predictions(metric, predictions, batch, error, words):
    check_refusal(lambda: metric.update(metric.init(), predictions, batch), error, *words)


def test_mean_loss_averages_over_unpadded_examples_and_inner_axes():
    metric = MeanLoss(lambda predictions, batch: (predictions - batch["y"]) ** 2)
    batch = {"y": np.zeros((3, 2), np.float32), "mask": np.array([True, True, False])}
    # Examples (1, 3), (2, 4) and padding: the squares 1, 9, 4, 16 have the mean 7.5.
    assert compute(metric, np.array([[1, 3], [2, 4], [np.nan, np.inf]], np.float32), batch) == {"loss": 7.5}


def test_mean_loss_returns_the_total_and_the_parts():
    metric = MeanLoss(lambda p, batch: {"loss_a": p, "loss_b": 2 * p, "error": 10 * p}, ("loss_b", "loss_a", "error"))
    got = compute(metric, np.array([1.0, 3.0]), {"y": np.zeros(2)})
    assert list(got.items()) == [("loss", 6.0), ("loss_b", 4.0), ("loss_a", 2.0), ("error", 20.0)]


def test_a_scalar_loss_is_weighted_by_the_unpadded_examples():
    metric = MeanLoss(lambda p, batch: p)
    state = metric.init()
    for value, mask in ((1.0, [True, True, True]), (4.0, [True, False, False]), (np.nan, [False] * 3)):
        state = metric.update(state, jnp.float32(value), {"mask": np.array(mask)})
    assert metric.compute(state) == {"loss": (3 * 1.0 + 4.0) / 4}


def test_a_loss_can_return_its_weight():
    metric = MeanLoss(lambda p, batch: (p.sum(), batch["tokens"]))
    state = metric.init()
    for values, tokens in (([1.0, 2.0], 6), ([9.0, 0.0], 2)):
        state = metric.update(state, jnp.array(values), {"tokens": jnp.int32(tokens)})
    assert metric.compute(state) == {"loss": 12 / 8}


def test_the_loss_can_be_a_config():
    @MODELS.register_module("AbsoluteTest", force=True)
    class Absolute:
        def __init__(self, scale):
            self.scale = scale

        def __call__(self, predictions, batch):
            return self.scale * abs(predictions)

    metric = METRICS.build({"type": "MeanLoss", "loss": {"type": "AbsoluteTest", "scale": 2.0}})
    assert compute(metric, np.array([-1.0, 2.0]), {"y": np.zeros(2)}) == {"loss": 3.0}


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"loss": 3}, TypeError, ["loss`"]),
        ({"loss": abs, "parts": ("loss",)}, ValueError, ["total itself"]),
        ({"loss": abs, "parts": ("a", "b")}, ValueError, ["`MeanLoss.parts`", "'loss'"]),
    ],
)
def test_mean_loss_rejects_illegal_arguments(arguments, error, words):
    check_refusal(lambda: MeanLoss(**arguments), error, *words)


def test_the_error_of_a_sum_does_not_grow_with_the_number_of_additions():
    values = np.random.RandomState(0).uniform(0, 1e3, 20_000).astype(np.float32)
    total, _ = jax.jit(lambda v: jax.lax.scan(lambda s, x: (s.add(x), None), Sum.zero(), v))(values)
    exact = math.fsum(values.tolist())
    assert abs(total.value() - exact) < 1e-9 * exact
    # A plain float32 sum is far less accurate, so the compiler did not remove the compensation.
    plain, _ = jax.lax.scan(lambda s, x: (s + x, None), jnp.float32(0), values)
    assert abs(float(plain) - exact) > 1e-7 * exact


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_sum_propagates_infinity_and_nan(bad):
    np.testing.assert_equal(Sum.zero().add(jnp.float32(1)).add(jnp.float32(bad)).value(), bad)


def test_update_preserves_strong_dtypes():
    for metric in (Accuracy(), MeanLoss(lambda p, batch: p.mean(axis=1))):
        state = metric.init()
        new_state = jax.jit(metric.update)(state, LOGITS, {"label": LABELS})
        assert jax.tree.map(lambda x: (x.dtype, x.shape, x.weak_type), state) == jax.tree.map(
            lambda x: (x.dtype, x.shape, x.weak_type), new_state
        )


def test_results_without_examples_are_nan():
    assert math.isnan(Accuracy().compute(jax.device_get(Accuracy().init()))["top1"])
    loss = MeanLoss(lambda p, batch: p)
    assert math.isnan(loss.compute(jax.device_get(loss.init()))["loss"])


def test_prefixes_are_added_to_names():
    assert Accuracy().add_prefix("top1") == "accuracy/top1"
    assert Accuracy(prefix="val_set").add_prefix("top1") == "val_set/top1"
    assert MeanLoss(abs).add_prefix("loss") == "loss"
    assert isinstance(HostMetric(), BaseMetric)
