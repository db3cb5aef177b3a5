import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.evaluation import Accuracy, BaseMetric, HostMetric, MeanLoss
from jengine.evaluation.metric import Sum
from jengine.registry import METRICS, MODELS

# Ranks of the true class, counted by hand: 0, 1, 2 and, for equal logits, by class number: 1.
LOGITS = np.array([[5, 1, 0], [5, 9, 0], [1, 2, 0], [3, 3, 0]], np.float32)
LABELS = np.array([0, 0, 2, 1], np.int32)


def result(metric, predictions, batch):
    state = jax.jit(metric.update)(metric.init(), predictions, batch)
    return metric.compute(jax.device_get(state))


def test_accuracy_counts_the_true_class_among_the_first_k():
    assert result(Accuracy(topk=(1, 2, 3)), LOGITS, {"label": LABELS}) == {"top1": 0.25, "top2": 0.75, "top3": 1.0}


def test_accuracy_agrees_with_argmax_where_logits_are_equal():
    logits = np.random.RandomState(0).randint(0, 3, (200, 5)).astype(np.float32)
    labels = np.random.RandomState(1).randint(0, 5, 200)
    got = result(Accuracy(), logits, {"label": labels})["top1"]
    assert got == (logits.argmax(axis=1) == labels).mean()


def test_padded_rows_do_not_count():
    batch = {"label": LABELS, "mask": np.array([True, True, False, False])}
    assert result(Accuracy(topk=(1, 2)), LOGITS, batch) == {"top1": 0.5, "top2": 1.0}


def test_class_numbers_are_predictions_too():
    assert result(Accuracy(), np.array([0, 1, 2, 2]), {"label": LABELS}) == {"top1": 0.5}


def test_entries_are_chosen_by_name():
    metric = Accuracy(label="target", prediction="logits")
    assert result(metric, {"logits": LOGITS, "other": 0}, {"target": LABELS})["top1"] == 0.25


def test_a_row_with_nan_and_a_label_that_is_no_class_are_wrong():
    logits = LOGITS.copy()
    logits[0, 2] = np.nan
    assert result(Accuracy(), logits, {"label": np.array([0, 1, -1, 3])}) == {"top1": 0.25}


def test_minus_infinity_is_a_logit_like_any_other():
    logits = np.array([[-np.inf, 0.0], [-np.inf, 0.0]], np.float32)
    assert result(Accuracy(topk=(1, 2)), logits, {"label": np.array([1, 0])}) == {"top1": 0.5, "top2": 1.0}


@pytest.mark.parametrize("topk", [0, (), (1, 1), (5, -1)])
def test_accuracy_refuses_a_k_that_makes_no_sense(topk):
    with pytest.raises(ValueError, match="topk is one or more different numbers from 1 on"):
        Accuracy(topk=topk)


@pytest.mark.parametrize(
    ("metric", "predictions", "batch", "error", "message"),
    [
        (Accuracy(topk=(5,)), LOGITS, {"label": LABELS}, ValueError, "top-5 of 3 classes"),
        (Accuracy(topk=(2,)), LABELS, {"label": LABELS}, ValueError, "top-2 needs logits"),
        (Accuracy(), LOGITS, {"labels": LABELS}, KeyError, "the batch has no entry 'label'; did you mean 'labels'"),
        (Accuracy(), {"logit": LOGITS}, {"label": LABELS}, KeyError, "with prediction=; expected one of: logit"),
        (Accuracy(), LOGITS, {"label": np.eye(3)[LABELS]}, ValueError, r"found predictions float32\[4, 3\] and labels"),
        (Accuracy(), LOGITS, {"label": LABELS[:3]}, ValueError, r"int32\[3\]"),
        (Accuracy(), LOGITS, {"label": LABELS / 2}, ValueError, "labels are integers"),
        (Accuracy(), LOGITS, {"label": LABELS, "mask": np.ones((4, 1))}, ValueError, "the mask of a batch is bool"),
    ],
)
def test_accuracy_says_what_it_cannot_use(metric, predictions, batch, error, message):
    with pytest.raises(error, match=message):
        metric.update(metric.init(), predictions, batch)


def test_the_mean_loss_is_the_mean_over_real_rows_and_inner_axes():
    metric = MeanLoss(lambda predictions, batch: (predictions - batch["y"]) ** 2)
    batch = {"y": np.zeros((3, 2), np.float32), "mask": np.array([True, True, False])}
    # Rows (1, 3), (2, 4) and one of padding: squares 1, 9, 4, 16, whose mean is 7.5.
    assert result(metric, np.array([[1, 3], [2, 4], [np.nan, np.inf]], np.float32), batch) == {"loss": 7.5}


def test_parts_of_a_loss_come_with_their_total():
    metric = MeanLoss(lambda p, batch: {"loss_a": p, "loss_b": 2 * p, "error": 10 * p}, ("loss_b", "loss_a", "error"))
    got = result(metric, np.array([1.0, 3.0]), {"y": np.zeros(2)})
    assert list(got.items()) == [("loss", 6.0), ("loss_b", 4.0), ("loss_a", 2.0), ("error", 20.0)]


def test_a_scalar_counts_for_the_real_rows_of_its_batch():
    metric = MeanLoss(lambda p, batch: p)
    state = metric.init()
    for value, mask in ((1.0, [True, True, True]), (4.0, [True, False, False]), (np.nan, [False] * 3)):
        state = metric.update(state, jnp.float32(value), {"mask": np.array(mask)})
    assert metric.compute(state) == {"loss": (3 * 1.0 + 4.0) / 4}


def test_a_loss_may_bring_its_own_weight():
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
    assert result(metric, np.array([-1.0, 2.0]), {"y": np.zeros(2)}) == {"loss": 3.0}


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"loss": 3}, TypeError, "loss is a function"),
        ({"loss": abs, "parts": ("loss",)}, ValueError, "'loss' is the name of the total"),
        ({"loss": abs, "parts": ("a", "b")}, ValueError, "whose name contains 'loss'; found"),
    ],
)
def test_the_mean_loss_refuses_bad_settings(arguments, error, message):
    with pytest.raises(error, match=message):
        MeanLoss(**arguments)


def test_unannounced_parts_say_how_to_announce_them():
    metric = MeanLoss(lambda p, batch: {"loss_a": p})
    with pytest.raises(ValueError, match=r"expected \['loss'\]; say parts=\['loss_a'\]"):
        metric.update(metric.init(), jnp.ones(2), {"y": np.zeros(2)})


def test_a_loss_of_another_length_is_refused():
    metric = MeanLoss(lambda p, batch: p)
    with pytest.raises(ValueError, match=r"one entry for each of the 2 rows of the batch, or none; found \(3,\)"):
        metric.update(metric.init(), jnp.ones(3), {"y": np.zeros(2)})


def test_a_sum_does_not_drift_with_the_number_of_additions():
    values = np.random.RandomState(0).uniform(0, 1e3, 20_000).astype(np.float32)
    total, _ = jax.jit(lambda v: jax.lax.scan(lambda s, x: (s.add(x), None), Sum.zero(), v))(values)
    exact = math.fsum(values.tolist())
    assert abs(total.value() - exact) < 1e-9 * exact
    # A plain float32 sum is off by far more, so the compiled sum did keep its compensation.
    plain, _ = jax.lax.scan(lambda s, x: (s + x, None), jnp.float32(0), values)
    assert abs(float(plain) - exact) > 1e-7 * exact


@pytest.mark.parametrize("bad", [np.inf, np.nan])
def test_a_sum_with_infinity_or_nan_says_so(bad):
    np.testing.assert_equal(Sum.zero().add(jnp.float32(1)).add(jnp.float32(bad)).value(), bad)


def test_states_are_strongly_typed_and_stay_so():
    for metric in (Accuracy(), MeanLoss(lambda p, batch: p.mean(axis=1))):
        state = metric.init()
        after = jax.jit(metric.update)(state, LOGITS, {"label": LABELS})
        assert jax.tree.map(lambda x: (x.dtype, x.shape, x.weak_type), state) == jax.tree.map(
            lambda x: (x.dtype, x.shape, x.weak_type), after
        )


def test_nothing_seen_is_nan():
    assert math.isnan(Accuracy().compute(jax.device_get(Accuracy().init()))["top1"])
    loss = MeanLoss(lambda p, batch: p)
    assert math.isnan(loss.compute(jax.device_get(loss.init()))["loss"])


def test_prefixes_stand_before_names():
    assert Accuracy().prefixed("top1") == "accuracy/top1"
    assert Accuracy(prefix="val_set").prefixed("top1") == "val_set/top1"
    assert MeanLoss(abs).prefixed("loss") == "loss"
    assert isinstance(HostMetric(), BaseMetric)
