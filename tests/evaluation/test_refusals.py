"""What metrics and evaluators refuse: a call, its error, and the words that must be in the message."""

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.evaluation import Accuracy, BaseMetric, Evaluator, HostMetric, MeanLoss
from tests.refusals import check_row

DATA = {"logits": np.zeros((6, 3), np.float32), "label": np.zeros(6, np.int32)}
PADDING = {**DATA, "mask": np.zeros(6, bool)}


class Ids(HostMetric):
    """Return two values."""

    default_prefix = "ids"

    def process(self, data_batch, data_samples):
        """Do nothing."""

    def compute_metrics(self, results):
        """Return the values."""
        return {"all": 1, "count": 2}


def evaluate(*metrics, batches=()):
    evaluator = Evaluator(list(metrics))
    state = evaluator.init()
    for batch in batches:
        state = evaluator.update(state, batch["logits"], batch)
    evaluator.evaluate(state)


def update(loss, predictions):
    metric = MeanLoss(loss)
    metric.update(metric.init(), predictions, {"y": np.zeros(2)})


REFUSED = {
    "two host metrics with the same names": (lambda: evaluate(Ids(), Ids(), batches=[DATA]), ValueError, "unique", "'ids/all', 'ids/count'"),
    "no example": (lambda: evaluate(Accuracy()), ValueError, "at least one example", "got none"),
    "padding alone": (lambda: evaluate(Accuracy(), batches=[PADDING]), ValueError, "at least one example", "got none"),
    "fewer labels than predictions": (
        lambda: Evaluator(Accuracy()).offline_evaluate(DATA["logits"], {"label": DATA["label"][:3]}), ValueError, "labels", "predictions", "got 3 and 6",
    ),
    **{f"topk={topk}": (lambda topk=topk: Accuracy(topk=topk), ValueError, words, "integer") for topk, words in ((0, "topk`"), ((), "topk`"), ((1, 1), "topk`"), ((5, -1), "topk[1]`"))},
    "a part that is not declared": (lambda: update(lambda p, batch: {"loss_a": p}, jnp.ones(2)), ValueError, "['loss']", "got ['loss_a']", "parts=['loss_a']"),
    "a loss of another batch size": (lambda: update(lambda p, batch: p, jnp.ones(3)), ValueError, "scalar", "[2, ...]", "got (3,)"),
    "a metric of the host of another class": (
        lambda: type("Wrong", (BaseMetric,), {name: vars(Ids)[name] for name in ("process", "compute_metrics")}), TypeError, "Wrong", "HostMetric", "`process`", "`compute_",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_cannot_be_evaluated_is_refused(row, request):
    check_row(request, *row)
