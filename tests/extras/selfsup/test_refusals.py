"""What the hooks of self-supervised methods refuse: a call, its error, and the words that must be in the message."""

import types

import jax.numpy as jnp
import numpy as np
import pytest

from jengine.data import ArrayDataset
from jengine.extras.selfsup import ODCHook, PseudoLabelDataset, compare_features, empty_bank
from jengine.extras.selfsup.clustering import build_clustering
from jengine.extras.selfsup.memory_bank import fill_bank
from jengine.extras.selfsup.swav import SwAVHook
from jengine.model import FunctionalModel
from tests.refusals import check_row

DATA = ArrayDataset(dict(x=np.ones((4, 1), np.float32)))


def train(make_runner, hook):
    """Train a model with an encoder and prototypes, which keeps no queue."""
    make_runner(
        model=FunctionalModel(
            lambda: ({"encoder": jnp.ones(()), "head": jnp.ones(()), "prototypes": {"kernel": jnp.ones(())}}, {}),
            lambda params, model_state, batch: ({"loss": params["encoder"] * batch["x"].sum()}, {}),
            lambda params, batch: {"logits": batch["x"]},
        ),
        train_dataloader=dict(batch_size=4, dataset=PseudoLabelDataset(DATA) if hook["type"] == "DeepClusterHook" else DATA),
        custom_hooks=[hook],
    ).train()


CLUSTER = dict(
    type="DeepClusterHook", extract_dataloader=dict(batch_size=4, dataset=DATA), clustering=dict(type="Kmeans", k=2, pca_dim=-1),
    unif_sampling=False, reweight=False, reweight_pow=0.5,
)  # fmt: skip
REFUSED = {
    "a misspelt clustering": (lambda: build_clustering(dict(type="KMeans", k=2)), KeyError, "'KMeans'", "did you mean 'Kmeans'"),
    "a model without features": (lambda make_runner: train(make_runner, CLUSTER), AssertionError, "'features'", "got ['logits']"),
    "a memory of one process": (lambda: ODCHook(10, 1, 50, True, 0.5, dist_mode=False), AssertionError, "`dist_mode`", "True", "got False"),
    "a memory without a cluster": (lambda: fill_bank(empty_bank(2, 2, 3), np.eye(2), [0, 2]), AssertionError, "`labels`", "every cluster", "[1]"),
    "a memory of another length": (lambda: fill_bank(empty_bank(2, 2, 3), np.ones((3, 2)), [0, 1, 2]), AssertionError, "`features`", "(2, 2), got (3, 2)"),
    "labels for other samples": (lambda: PseudoLabelDataset(DATA).assign_labels([0, 1]), AssertionError, "`labels`", "4", "got 2"),
    "a predictor without its mark": (lambda make_runner: train(make_runner, dict(type="SimSiamHook", fix_pred_lr=True, lr=0.05)), AssertionError, "fix_lr=True", "got none", "predictor"),
    "frozen layers of nothing": (
        lambda make_runner: train(make_runner, dict(type="SwAVHook", batch_size=4, feat_dim=4, frozen_layers_cfg={"prototipes": 2})),
        AssertionError, "'prototipes'", "did you mean 'prototypes.kernel'",
    ),
    "a model that does not return its queue": (lambda make_runner: train(make_runner, dict(type="SwAVHook", batch_size=4, queue_length=4)), ValueError, "`model_state.queue.rows`", "absent"),
    "a queue shorter than a batch": (lambda: SwAVHook(batch_size=4, queue_length=3), ValueError, "`queue_length`", "0", "4", "got 3"),
    "features of no run": (
        lambda: compare_features(types.SimpleNamespace(state=None, strategy=None), train=DATA, test=DATA), ValueError, "`runner`", "state", "runner.train()",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", REFUSED.values(), ids=REFUSED)
def test_what_a_method_does_not_have_is_refused(row, request):
    check_row(request, *row)
