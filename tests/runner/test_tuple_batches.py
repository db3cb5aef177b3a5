"""Train on tuples and lists, and with models that return several outputs."""

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine import checkpoint
from jengine.config.errors import ConfigError
from jengine.data import ArrayDataset
from jengine.evaluation import HostMetric
from jengine.hooks import NonFiniteLossError
from jengine.model import CrossEntropy, LinenModel, NnxModel

NUM_CLASSES = 3


def make_arrays(count, seed=0):
    """Return points and the index of their largest coordinate, which a linear model can learn."""
    x = np.random.RandomState(seed).randn(count, NUM_CLASSES).astype(np.float32)
    return x, x.argmax(axis=1)


class Backbone(nn.Module):
    """Return logits and intermediate outputs, as the ViT of big_vision does."""

    @nn.compact
    def __call__(self, image, *, train=False):
        out = {"pre_logits": image}
        return nn.Dense(NUM_CLASSES)(image), out


class Linear(nnx.Module):
    def __init__(self, rngs):
        self.head = nnx.Linear(NUM_CLASSES, NUM_CLASSES, rngs=rngs)

    def __call__(self, x):
        return self.head(x), {"pre_logits": x}


class Seen(HostMetric):
    """Record the structure of batches on the host."""

    def process(self, data_batch, data_samples):
        x, y = data_batch
        self.results.append((len(x), len(y), len(data_samples[0])))

    def compute_metrics(self, results):
        return {"sizes": sorted(results)}


@pytest.fixture
def make_tuple_runner(make_runner):
    def make(container=tuple, labels=lambda y: y, val_labels=lambda y: y, loss=None, model=None, **changes):
        def make_dataset(count, relabel):
            x, y = make_arrays(count)
            arrays = x, relabel(y)
            return (
                ArrayDataset(arrays) if container is tuple else [list(sample) for sample in zip(*arrays, strict=True)]
            )

        return make_runner(**{**dict(
            model=model or LinenModel(Backbone(), loss or CrossEntropy(label=1, output=0), inputs=0),
            train_dataloader=dict(dataset=make_dataset(32, labels), batch_size=8),
            train_cfg=dict(max_epochs=1),
            optim_wrapper=dict(optimizer=dict(type="Adam", lr=0.1)),
            val_dataloader=dict(dataset=make_dataset(18, val_labels), batch_size=8),
            val_evaluator=dict(type="Accuracy", label=1, prediction=0),
            randomness=dict(seed=0),
        ), **changes}, validates=True)  # fmt: skip

    return make


@pytest.mark.parametrize("container", [tuple, list])
@pytest.mark.parametrize("flavour", ["linen", "nnx"])
def test_a_model_with_several_outputs_trains_on_tuples_and_lists(make_tuple_runner, container, flavour):
    model = NnxModel(Linear, CrossEntropy(label=1, output=0), inputs=0) if flavour == "nnx" else None
    runner = make_tuple_runner(
        container, model=model, train_cfg=dict(max_epochs=8),
        val_evaluator=[dict(type="Accuracy", label=1, prediction=0), Seen()],
    )  # fmt: skip
    runner.train()
    metrics = runner.validations[-1][2]
    assert metrics["accuracy/top1"] > 0.85  # 0.33 by chance
    assert metrics["sizes"] == [(2, 2, 2), (8, 8, 8), (8, 8, 8)]  # without the padding of the last batch


@pytest.mark.parametrize(
    "changes", [dict(parallel="DataParallel"), dict(train_cfg=dict(max_epochs=1, steps_per_call=2))]
)
def test_padded_tuples_train_like_padded_dicts(make_tuple_runner, make_runner, changes, tmp_path):
    x, y = make_arrays(28)
    params = []
    for arrays, inputs, label in (((x, y), 0, 1), (dict(x=x, y=y), "x", "y")):
        runner = make_tuple_runner(
            model=LinenModel(Backbone(), CrossEntropy(label=label, output=0), inputs=inputs),
            train_dataloader=dict(dataset=ArrayDataset(arrays), batch_size=8, drop_last=False),
            val_dataloader=None, val_cfg=None, val_evaluator=None, work_dir=tmp_path / str(inputs), **changes,
        )  # fmt: skip
        params.append(runner.train().params)
    jax.tree.map(np.testing.assert_array_equal, *params)


@pytest.mark.parametrize(
    "changes", [dict(), dict(parallel="DataParallel"), dict(train_cfg=dict(max_epochs=1, steps_per_call=2))]
)
def test_training_stops_at_a_label_outside_the_classes(make_tuple_runner, changes):
    runner = make_tuple_runner(labels=lambda y: y + 1, default_hooks=dict(logger=None), **changes)  # saves each epoch
    with pytest.raises(
        NonFiniteLossError, match=r"`CrossEntropy.label` must be .* from 0 to 2, .* got 1 to 3 in the entry '1'"
    ):
        runner.train()
    assert checkpoint.find_latest(runner.work_dir) is None


def test_validation_stops_at_a_label_outside_the_classes(make_tuple_runner):
    runner = make_tuple_runner(val_labels=lambda y: np.where(np.arange(len(y)) == 17, -1, y))
    with pytest.raises(ConfigError, match="`Accuracy.label` must be .* set ignore_index=-1 if this value marks"):
        runner.train()
    assert runner.iter == 4
    assert not runner.validations


def test_ignored_labels_train_and_validate_like_data_without_them(make_tuple_runner, tmp_path):
    def hide(y):
        return np.where(np.arange(len(y)) % 2 == 1, -100, y)

    results = []
    for name, train, relabel in (("hidden", make_arrays(32), hide), ("removed", make_arrays(32), lambda y: y)):
        x, y = train[0], relabel(train[1])
        kept = slice(None) if name == "hidden" else slice(None, None, 2)
        runner = make_tuple_runner(
            loss=CrossEntropy(label=1, output=0, ignore_index=-100),
            train_dataloader=dict(
                dataset=ArrayDataset((x[kept], y[kept])), batch_size=8 if name == "hidden" else 4,
                sampler=dict(type="DefaultSampler", shuffle=False),
            ),
            val_dataloader=dict(dataset=ArrayDataset((x[kept], y[kept])), batch_size=8),
            val_evaluator=dict(type="Accuracy", label=1, prediction=0, ignore_index=-100),
            work_dir=tmp_path / name,
        )  # fmt: skip
        runner.train()
        results.append((runner.state.params, runner.validations[-1][2]["accuracy/top1"]))
    (hidden, accuracy), (removed, expected) = results
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6), hidden, removed)
    assert accuracy == expected
