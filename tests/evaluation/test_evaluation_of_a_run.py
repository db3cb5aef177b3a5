import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx

from jengine.checkpoint import read_meta
from jengine.data import ArrayDataset
from jengine.evaluation import BaseMetric
from jengine.extras.metrics import MetricAdapter
from jengine.extras.serving import BaseTTAModel
from jengine.model import FunctionalModel, LinenModel, Model, NnxModel
from tests.runner.conftest import build_runner

SIZE = 22
rng = np.random.RandomState(0)
DATA = {"x": rng.normal(size=(SIZE, 3)).astype(np.float32), "label": rng.randint(0, 3, SIZE).astype(np.int32)}
STRATEGIES = {
    "one device": None,
    "Pjit": dict(type="Pjit", mesh=dict(data=4), devices=4),
    "DataParallel": dict(type="DataParallel", devices=4),
}


@pytest.fixture(scope="module", autouse=True)
def scikit_learn():
    """Import scikit-learn where these tests run: each process that collects tests would take a second for it."""
    global sklearn
    from sklearn import metrics as sklearn


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
        **dict.fromkeys(("train_dataloader", "train_cfg", "optim_wrapper")),
        val_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)),
        val_cfg=dict(),
        val_evaluator=evaluator,
    )
    return build_runner(work_dir, **{**arguments, **changes})


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


def test_results_that_are_no_numbers_do_not_stop_the_save_after_a_validation(tmp_path):
    class Described(BaseMetric):
        def init(self):
            return jnp.zeros(())

        def update(self, state, predictions, batch):
            return state + 1

        def compute(self, state):
            return {"batches": state, "note": "text", "none": None, "by_class": np.ones(2), "nested": {"a": 1.0}}

    runner = make_runner(
        tmp_path,
        Described(),
        train_dataloader=dict(batch_size=8, dataset=ArrayDataset(DATA)),
        train_cfg=dict(max_epochs=2),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.0)),
        default_hooks=dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=None),
    )
    runner.train()
    assert read_meta(str(tmp_path / "epoch_2"))["validations"] == [[1, 2, {"batches": 3.0}]]


def sampler(predict):
    """Return a model without training that samples, for batches of 8 of the 22 examples."""
    return FunctionalModel(
        init=lambda: {"w": jnp.eye(3)}, loss=lambda params, batch: params["w"].sum(), predict=predict
    )


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(3)(x) * 0 + jax.random.normal(self.make_rng("noise"), (len(x), 3))


class Nnx(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.rngs = nnx.Linear(3, 3, rngs=rngs), rngs

    def __call__(self, x):
        return self.linear(x) * 0 + jax.random.normal(self.rngs.noise(), (len(x), 3))


def no_loss(outputs, batch):
    return outputs.mean()


class Own(Model):
    def init(self, rng, batch):
        return {"w": jnp.eye(3)}, {}

    def predict(self, params, model_state, batch, rng):
        return jax.random.normal(rng, (len(batch["x"]), 3))


MODELS_THAT_SAMPLE = {
    "functional": lambda: sampler(lambda params, batch, rng: jax.random.normal(rng, (len(batch["x"]), 3))),
    "own": Own,
    "linen": lambda: LinenModel(Linen(), no_loss, inputs="x", predict_rngs=["noise"]),
    "nnx": lambda: NnxModel(Nnx, no_loss, inputs="x"),
}


@pytest.mark.parametrize("model", MODELS_THAT_SAMPLE)
def test_a_model_that_samples_gets_a_key_for_each_batch(tmp_path, model):
    def run(name, **changes):
        evaluator = MetricAdapter(nnx.metrics.Average, lambda p, batch: {"values": p[:, 0]})
        changes = {"model": MODELS_THAT_SAMPLE[model](), "randomness": dict(seed=3), **changes}
        return make_runner(tmp_path / name, evaluator, **changes)

    runner = run("a")
    samples = runner.predict(DATA, batch_size=8)
    assert len(np.unique(samples)) == samples.size == 3 * SIZE  # no two batches have the same noise
    assert runner.val()["average"] == pytest.approx(samples[:, 0].mean(), rel=1e-5)  # the noise of the validation
    assert runner.val() == runner.val()
    np.testing.assert_array_equal(run("b").predict(DATA, batch_size=8), samples)
    assert not np.isin(runner.predict(DATA, batch_size=8, seed=4), samples).any()
    assert not np.isin(run("c", randomness=dict(seed=4)).predict(DATA, batch_size=8), samples).any()


def test_whole_batches_are_sampled_with_keys_of_their_own(tmp_path):
    loader = dict(dataset=[{"x": DATA["x"][:size]} for size in (4, 4)], batch_axis=None)
    first, second = make_runner(tmp_path, nnx.metrics.Accuracy(), model=Own()).predict(loader)
    assert not np.isin(first, second).any()


@pytest.mark.parametrize("strategy", ["Pjit", "DataParallel"])
def test_samples_on_several_devices(tmp_path, strategy):
    def run(name, **changes):
        return make_runner(
            tmp_path / name,
            nnx.metrics.Accuracy(),
            model=MODELS_THAT_SAMPLE["own"](),
            randomness=dict(seed=3),
            **changes,
        )

    one, several = run("one").predict(DATA, 8), run("several", parallel=STRATEGIES[strategy]).predict(DATA, 8)
    if strategy == "Pjit":
        np.testing.assert_allclose(several, one, rtol=1e-6)
    assert len(np.unique(several)) == 3 * SIZE  # the replicas sample by themselves


def test_the_key_does_not_depend_on_the_precision(tmp_path):
    def predict(name, **changes):
        model = MODELS_THAT_SAMPLE["linen"]()
        return make_runner(
            tmp_path / name, nnx.metrics.Accuracy(), model=model, randomness=dict(seed=3), **changes
        ).predict(DATA, 8)

    np.testing.assert_allclose(predict("low", precision="bfloat16"), predict("full"), atol=0.02)


def test_a_wrapper_of_the_user_need_not_pass_the_key_on(tmp_path):
    class Constant(BaseTTAModel):
        def predict(self, params, model_state, batch):
            return jnp.zeros((len(batch["x"]), 3))

    runner = make_runner(tmp_path, nnx.metrics.Accuracy(), model=Constant(Own()))
    assert not runner.predict(DATA, batch_size=8).any()
