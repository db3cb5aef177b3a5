"""What further metrics refuse: a call, its error, and the words that must be in the message."""

import sys

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.extras.metrics import BLEU, IoUMetric, MeanSquaredErrorMetric, MetricAdapter
from tests.refusals import check_row

LABELS = np.array([[[0, 0, 0, 1, 1, 255]]], np.int32)


def update(metric, predictions, **batch):
    metric.update(metric.init(), predictions, batch)


def score_without_sacrebleu(monkeypatch):
    monkeypatch.setitem(sys.modules, "sacrebleu", None)
    BLEU()


REFUSED = {
    "a metric without its labels": (
        lambda: update(MetricAdapter(nnx.metrics.Accuracy), jnp.zeros((4, 6)), target=jnp.zeros(4, jnp.int32)), ValueError, "`MetricAdapter.inputs`", "['labels']", "'accuracy'", "target i32",
    ),
    "logits of another layout": (lambda: update(IoUMetric(num_classes=3), jnp.zeros((1, 1, 6, 4)), label=LABELS), ValueError, "i32[1,1,6]", "got f32[1,1,6,4]"),
    "a misspelt label": (lambda: update(IoUMetric(num_classes=3, label="labels"), LABELS, label=LABELS), KeyError, "did you mean 'label'"),
    "predictions in a dict": (lambda: update(IoUMetric(num_classes=3), {"seg": LABELS}, label=LABELS), KeyError, "`IoUMetric.prediction`", "got None"),
    "one class": (lambda: IoUMetric(num_classes=1), ValueError, "`num_classes`", "at least 2", "got 1"),
    "predictions that would broadcast": (lambda: update(MeanSquaredErrorMetric(), jnp.zeros((4, 1)), target=jnp.zeros(4)), ValueError, "f32[4]", "got f32[4,1]"),
    "BLEU without sacrebleu": (score_without_sacrebleu, ImportError, "pip install 'jengine[bleu]'"),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_measured_is_refused(row, request):
    check_row(request, *row)
