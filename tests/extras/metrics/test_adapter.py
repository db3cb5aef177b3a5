import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jengine.data import ArrayDataset, DataLoader
from jengine.evaluation import Accuracy, Evaluator, build_evaluator
from jengine.extras.metrics import MetricAdapter
from tests.refusals import check_refusal

SIZE = 45
rng = np.random.RandomState(0)
DATA = {
    "logits": rng.normal(size=(SIZE, 6)).astype(np.float32),
    "label": rng.randint(0, 6, SIZE).astype(np.int32),
    "binary": rng.randint(0, 2, SIZE).astype(np.int32),
    "score": rng.uniform(size=SIZE).astype(np.float32),
}
ACCURACY = (DATA["logits"].argmax(axis=1) == DATA["label"]).mean()


def evaluate(metrics, batch_size, shard=None):
    """Return the results over all data, whose last batch is padded, with the scores as a dict of predictions."""
    evaluator = build_evaluator(metrics)
    update, state = jax.jit(evaluator.update), evaluator.init()
    for batch in DataLoader(ArrayDataset(DATA), batch_size):
        batch = batch if shard is None else jax.device_put(batch, shard)
        state = update(state, {name: batch[name] for name in ("logits", "score")}, batch)
        evaluator.process_host({name: batch[name] for name in ("logits", "score")}, batch)
    return evaluator.evaluate(state)


@pytest.mark.parametrize("batch_size", [7, SIZE, 64])
def test_nnx_metrics_are_used_as_they_are_and_do_not_count_padding(batch_size):
    used = nnx.metrics.Accuracy()
    used.update(logits=jnp.eye(3), labels=jnp.arange(3))
    metrics = [
        used,
        Accuracy(prediction="logits", prefix="own"),
        MetricAdapter(
            nnx.MultiMetric(best=nnx.metrics.Average("score"), all=nnx.metrics.Welford("score")), prefix="multi"
        ),
        MetricAdapter(nnx.metrics.Welford, inputs={"values": "score"}, name="host", on_host=True),
    ]
    got = evaluate(metrics, batch_size)
    score = DATA["score"].astype(np.float64)
    assert got["accuracy"] == pytest.approx(ACCURACY, rel=1e-6)
    assert got["own/top1"] == ACCURACY
    assert got["multi/best"] == pytest.approx(score.mean(), rel=1e-6)
    for name in ("multi/all", "host"):
        assert got[f"{name}/mean"] == pytest.approx(score.mean(), rel=1e-6)
        assert got[f"{name}/standard_deviation"] == pytest.approx(score.std(), rel=1e-6)
    assert used.compute() == 1  # the object of the user has not changed


@pytest.mark.parametrize(
    "cfg",
    [
        nnx.metrics.Accuracy,
        "flax.nnx.metrics.Accuracy",
        {"type": "flax.nnx.metrics.Accuracy"},
        {
            "type": "MetricAdapter",
            "metric": "flax.nnx.metrics.Accuracy",
            "inputs": {"logits": "predictions.logits", "labels": "batch.label"},
        },
        {
            "type": "MetricAdapter",
            "metric": {"type": "flax.nnx.metrics.Accuracy"},
            "inputs": lambda p, b: {"logits": p["logits"], "labels": b["label"]},
        },
    ],
)
def test_a_config_names_the_class_and_the_inputs(cfg):
    assert build_evaluator(cfg).names == ("accuracy",)
    assert evaluate([cfg], 32)["accuracy"] == pytest.approx(ACCURACY, rel=1e-6)


def test_predictions_without_names_are_the_logits():
    evaluator = Evaluator(nnx.metrics.Accuracy())
    state = evaluator.update(evaluator.init(), DATA["logits"], {"label": DATA["label"]})
    assert evaluator.evaluate(state)["accuracy"] == pytest.approx(ACCURACY, rel=1e-6)


def test_padding_that_is_not_a_number_does_not_count():
    evaluator = Evaluator(nnx.metrics.Average("value"))
    batch = {"value": np.array([1.0, 3.0, np.nan], np.float32), "mask": np.array([True, True, False])}
    assert evaluator.evaluate(jax.jit(evaluator.update)(evaluator.init(), jnp.zeros(3), batch)) == {"average": 2.0}


@pytest.mark.parametrize(
    ("metric", "error", "words"),
    [
        (
            MetricAdapter(nnx.metrics.Accuracy, {"logits": "logit", "labels": "label"}),
            KeyError,
            ["`MetricAdapter.inputs.logits`", "got 'logit'", "did you mean 'logits'"],
        ),
        (
            MetricAdapter(nnx.metrics.Accuracy, {"logits": "score", "labels": "label"}),
            ValueError,
            ["logits.ndim==labels.ndim"],
        ),
    ],
)
def test_wrong_inputs_raise_with_what_there_is(metric, error, words):
    check_refusal(lambda: metric.update(metric.init(), {"logits": DATA["logits"], "score": DATA["score"]}, {"label": DATA["label"]}), error, *words)


@pytest.mark.foreign
@pytest.mark.parametrize("batch_size", [7, SIZE, 64])
def test_clu_metrics_and_collections_are_used_as_they_are(batch_size):
    clu = pytest.importorskip("clu.metrics")
    import flax

    @flax.struct.dataclass
    class WithoutEmptyOrMask(clu.Metric):
        total: jax.Array

        @classmethod
        def from_model_output(cls, score, **_):
            return cls(score.sum())

        def merge(self, other):
            return type(self)(self.total + other.total)

        def compute(self):
            return self.total

    collection = clu.Collection.create(accuracy=clu.Accuracy, mean=clu.Average.from_output("score"))
    collecting = clu.CollectingMetric.from_outputs(("score", "label"))
    got = evaluate(
        [collection, WithoutEmptyOrMask, collecting, {"type": "clu.metrics.Accuracy", "prefix": "path"}], batch_size
    )
    score = DATA["score"].astype(np.float64)
    assert got["accuracy"] == got["path/accuracy"] == pytest.approx(ACCURACY, rel=1e-6)
    assert got["mean"] == pytest.approx(score.mean(), rel=1e-6)
    assert got["without_empty_or_mask"] == pytest.approx(score.sum(), rel=1e-6)
    assert got["score"].tolist() == DATA["score"].tolist()
    assert got["label"].tolist() == DATA["label"].tolist()


@pytest.mark.foreign
@pytest.mark.parametrize("batch_size", [7, SIZE, 64])
def test_metrax_equals_one_call_with_all_data(batch_size):
    metrax = pytest.importorskip("metrax")
    inputs = {"predictions": "score", "labels": "binary"}
    names = ["MSE", "MAE", "RMSE", "RSQUARED", "Precision", "Recall", "AUCROC", "AUCPR"]
    metrics = [MetricAdapter(getattr(metrax, name), inputs) for name in names]
    metrics.append(
        {
            "type": "metrax.Perplexity",
            "inputs": {"predictions": "logits", "labels": "label"},
            "arguments": {"from_logits": True},
        }
    )
    metrics.append(MetricAdapter("metrax.nnx.Precision", inputs, {"threshold": 0.25}, name="quarter"))
    got = evaluate(metrics, batch_size)
    for name in names:
        expected = getattr(metrax, name).from_model_output(DATA["score"], DATA["binary"]).compute()
        assert got[name.lower()] == pytest.approx(float(expected), rel=1e-6), name
    expected = metrax.Perplexity.from_model_output(DATA["logits"], DATA["label"], from_logits=True).compute()
    assert got["perplexity"] == pytest.approx(float(expected), rel=1e-6)
    expected = metrax.Precision.from_model_output(DATA["score"], DATA["binary"], threshold=0.25).compute()
    assert got["quarter"] == pytest.approx(float(expected), rel=1e-6)


@pytest.mark.foreign
def test_metrax_metrics_of_strings_run_on_the_host():
    metrax = pytest.importorskip("metrax")
    words = np.array(["the cat sat on the mat", "a dog", "the end of it all now"])
    text = [words[i] for i in (0, 2, 2)]
    metric = MetricAdapter(
        metrax.BLEU, lambda p, b: {"predictions": [words[i] for i in p], "references": b["text"].tolist()}, on_host=True
    )
    evaluator = Evaluator(metric)
    batch = {"text": np.array(text), "mask": np.array([True, True, False])}
    state = evaluator.update(evaluator.init(), np.array([0, 1, 2]), {"mask": batch["mask"]})
    evaluator.process_host(np.array([0, 1, 2]), batch)
    expected = metrax.BLEU.from_model_output([words[0], words[1]], text[:2]).compute()
    assert evaluator.evaluate(state, gather=lambda results, name: results)["bleu"] == pytest.approx(float(expected))
