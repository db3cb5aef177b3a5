import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from sklearn import metrics as sklearn

from jengine.data import ArrayDataset
from jengine.evaluation import MetricAdapter
from jengine.model import FunctionalModel
from jengine.runner import Runner

SIZE = 22
rng = np.random.RandomState(0)
DATA = {"x": rng.normal(size=(SIZE, 3)).astype(np.float32), "label": rng.randint(0, 3, SIZE).astype(np.int32)}
STRATEGIES = {
    "one device": None,
    "Pjit": dict(type="Pjit", mesh=dict(data=4), devices=4),
    "DataParallel": dict(type="DataParallel", devices=4),
}


@flax.struct.dataclass
class ClassMean:
    """Metric in the style of clu, without `empty()` and without a mask."""

    total: jax.Array
    count: jax.Array

    @classmethod
    def from_model_output(cls, logits):
        return cls(logits.sum(axis=0), jnp.array(len(logits)))

    def merge(self, other):
        return ClassMean(self.total + other.total, self.count + other.count)

    def compute(self):
        return {f"class{i}": mean for i, mean in enumerate(self.total / self.count)}


def make_runner(work_dir, evaluator, **changes):
    def predict(params, batch):
        return batch["x"] @ params["w"]

    arguments = dict(
        model=FunctionalModel(
            init=lambda: {"w": jnp.eye(3)}, loss=lambda params, batch: predict(params, batch).mean(), predict=predict
        ),
        work_dir=work_dir,
        val_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)),
        val_cfg=dict(),
        val_evaluator=evaluator,
        default_hooks=dict(checkpoint=None, logger=None),
    )
    return Runner(**{**arguments, **changes})


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_metrics_are_the_same_on_one_device_and_on_several(tmp_path, strategy):
    evaluator = [
        nnx.metrics.Accuracy(),
        ClassMean,
        MetricAdapter(nnx.metrics.Welford, lambda p, batch: {"values": batch["x"][:, 0]}, on_host=True),
        dict(type="PrecisionRecallF1", num_classes=3),
        dict(type="AUROC"),
        dict(type="CalibrationError", num_bins=5),
        dict(type="R2Score", target="x"),
    ]
    got = make_runner(tmp_path, evaluator, parallel=STRATEGIES[strategy]).val()
    x = DATA["x"].astype(np.float64)
    assert got["accuracy"] == pytest.approx((x.argmax(axis=1) == DATA["label"]).mean(), rel=1e-6)
    assert [got[f"class{i}"] for i in range(3)] == pytest.approx(x.mean(axis=0).tolist(), rel=1e-6)
    assert got["welford/mean"] == pytest.approx(x[:, 0].mean(), rel=1e-6)
    assert got["f1_macro"] == pytest.approx(sklearn.f1_score(DATA["label"], x.argmax(axis=1), average="macro"))
    probabilities = np.exp(x) / np.exp(x).sum(axis=1, keepdims=True)
    assert got["auroc"] == pytest.approx(sklearn.roc_auc_score(DATA["label"], probabilities, multi_class="ovr"))
    assert got["r2"] == 1.0
    confidence, is_correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == DATA["label"]
    gaps = np.bincount(np.ceil(confidence * 5).astype(int), weights=is_correct - confidence)
    assert got["ece"] == pytest.approx(abs(gaps).sum() / SIZE, rel=1e-6)


def test_the_validations_of_a_training_compile_one_program(tmp_path):  # a further one would be an error
    runner = make_runner(
        tmp_path,
        [ClassMean, nnx.metrics.Accuracy],
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)),
        train_cfg=dict(by_epoch=True, max_epochs=2, on_recompile="raise"),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
    )
    runner.train()
    results = [metrics for _, _, metrics in runner.validations]
    assert len(results) == 2
    assert results[0] == results[1]
    assert results[0]["class1"] == pytest.approx(DATA["x"][:, 1].astype(np.float64).mean(), rel=1e-6)
