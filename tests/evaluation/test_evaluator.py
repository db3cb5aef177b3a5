import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import METRICS
from jengine.data import ArrayDataset, DataLoader
from jengine.evaluation import (
    Accuracy,
    BaseMetric,
    Evaluator,
    HostMetric,
    MeanLoss,
    build_evaluator,
    get_metric_value,
)
from tests.refusals import check_refusal

SIZE = 45
rng = np.random.RandomState(0)
DATA = {"logits": rng.normal(size=(SIZE, 6)).astype(np.float32), "label": rng.randint(0, 6, SIZE).astype(np.int32)}


def cross_entropy(predictions, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(predictions), batch["label"][:, None], axis=1)[:, 0]


class Ids(HostMetric):
    """Collect the labels that are transferred to the host."""

    default_prefix = "ids"

    def process(self, data_batch, data_samples):
        assert set(data_batch) == {"logits", "label"}
        assert len(data_samples) == len(data_batch["label"])
        self.results.append(data_batch["label"].tolist())

    def compute_metrics(self, results):
        return {"all": [label for batch in results for label in batch], "count": np.int64(sum(map(len, results)))}


def evaluate(evaluator, loader):
    update = jax.jit(evaluator.update)
    state = evaluator.init()
    for batch in loader:
        state = update(state, batch["logits"], batch)
        evaluator.process_host(jnp.asarray(batch["logits"]), batch)
    return evaluator.evaluate(state)


@pytest.mark.parametrize("batch_size", [1, 7, 32, SIZE, 64])
def test_results_are_the_same_for_any_batch_size(batch_size):
    evaluator = Evaluator([Accuracy(topk=(1, 3)), MeanLoss(cross_entropy), Ids()])
    got = evaluate(evaluator, DataLoader(ArrayDataset(DATA), batch_size))
    # The expected values, in float64 with NumPy.
    logits, labels = DATA["logits"].astype(np.float64), DATA["label"]
    order = np.argsort(-logits, axis=1)
    losses = np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(SIZE), labels]
    assert got["accuracy/top1"] == (order[:, 0] == labels).mean()
    assert got["accuracy/top3"] == (order[:, :3] == labels[:, None]).any(axis=1).mean()
    assert got["loss"] == pytest.approx(losses.mean(), rel=3e-7)  # a few float32 roundings
    assert got["ids/all"] == labels.tolist()
    assert got["ids/count"] == SIZE


def test_all_sums_are_fetched_in_one_transfer(monkeypatch):
    evaluator = Evaluator([Accuracy(topk=(1, 2)), MeanLoss(cross_entropy)])
    state = evaluator.update(evaluator.init(), jnp.asarray(DATA["logits"]), DATA)
    transfers = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda tree: transfers.append(1) or device_get(tree))
    result = evaluator.evaluate(state)
    assert len(transfers) == 1
    assert {type(value) for value in result.values()} == {float}


def test_update_transfers_nothing_to_the_host():
    evaluator = Evaluator(Accuracy())
    update = jax.jit(evaluator.update)
    state, logits, batch = jax.device_put((evaluator.init(), DATA["logits"], DATA))
    with jax.transfer_guard_device_to_host("disallow_explicit"):
        update(update(state, logits, batch), logits, batch)


def test_a_second_evaluation_starts_from_scratch():
    evaluator = Evaluator([Accuracy(), Ids()])
    loader = DataLoader(ArrayDataset(DATA), 16)
    assert evaluate(evaluator, loader) == evaluate(evaluator, loader)
    evaluator.process_host(DATA["logits"], DATA)  # interrupted: never evaluated
    assert evaluate(evaluator, loader)["ids/count"] == SIZE


def test_without_host_metrics_no_batch_is_fetched(monkeypatch):
    monkeypatch.setattr(jax, "device_get", None)
    Evaluator(Accuracy()).process_host(DATA["logits"], DATA)
    assert Evaluator(Accuracy()).host_metrics == []


def test_host_metrics_gather_the_results_of_all_processes():
    evaluator = Evaluator(Ids())
    state = evaluator.update(evaluator.init(), DATA["logits"], DATA)
    evaluator.process_host(DATA["logits"], DATA)
    got = evaluator.evaluate(state, gather=lambda results, name: [*results, [100, 101], [7] * (name == "Ids")])
    assert got["ids/count"] == SIZE + 3


class Batches(HostMetric):
    """Keep what is processed together."""

    def process(self, data_batch, data_samples):
        self.results.append((data_batch["label"], data_samples["logits"], data_samples["temperature"]))

    def compute_metrics(self, results):
        labels, logits, temperatures = zip(*results, strict=True)
        return {"labels": np.concatenate(labels), "logits": np.concatenate(logits), "temperatures": temperatures}


def test_results_of_several_processes_are_in_the_order_of_the_dataset_without_padding():
    labels = np.arange(10)
    parts = []
    for index in range(2):  # each of two processes has three batches of two examples, the last one with padding
        evaluator = Evaluator(Batches())
        evaluator.init()
        for start in range(0, 6, 2):
            positions = 2 * np.arange(start, start + 2) + index
            mask = positions < 10 - 1  # nine examples
            batch = {"label": np.where(mask, labels[positions % 10], -1), "mask": mask}
            predictions = {"logits": np.stack([batch["label"]] * 3, axis=1), "temperature": np.float32(0.5)}
            evaluator.process_host(predictions, batch, positions)
        evaluator.gather(lambda results, name: parts.append(results) or results)
    evaluator.gather(lambda results, name: [*parts[0], *parts[1]])
    [metric] = evaluator.host_metrics
    results = metric.collect(None)
    assert results["labels"].tolist() == list(range(9))
    assert results["logits"].tolist() == [[i] * 3 for i in range(9)]
    assert results["temperatures"] == (0.5,) * 9
    assert metric.results == []


@pytest.mark.parametrize(
    "cfg",
    [
        Accuracy(),
        {"type": "Accuracy"},
        [{"type": "Accuracy"}],
        (Accuracy(),),
        {"metrics": {"type": "Accuracy"}},
        {"type": "Evaluator", "metrics": [Accuracy()]},
        Evaluator(Accuracy()),
    ],
)
def test_every_form_of_config_builds_the_same_evaluator(cfg):
    evaluator = build_evaluator(cfg)
    assert [type(metric) for metric in evaluator.metrics] == [Accuracy]


def test_duplicate_names_raise_at_construction():
    with pytest.raises(ValueError, match="unique names, got 'accuracy/top1' more than once; set `prefix`"):
        Evaluator([Accuracy(), Accuracy(topk=(1, 2))])
    assert len(Evaluator([Accuracy(), Accuracy(prefix="other")]).metrics) == 2


def test_dataset_meta_is_passed_to_all_metrics():
    evaluator = Evaluator([Accuracy(), Ids()])
    evaluator.dataset_meta = {"classes": ("a", "b")}
    assert [metric.dataset_meta["classes"] for metric in evaluator.metrics] == [("a", "b")] * 2
    assert evaluator.dataset_meta == {"classes": ("a", "b")}


def test_results_that_are_not_numbers_are_returned_unchanged():
    class MixedResults(BaseMetric):
        def init(self):
            return jnp.zeros(3)

        def update(self, state, predictions, batch):
            return state + 1

        def compute(self, state):
            return {"per_class": state, "best": "a", "mean": state.mean()}

    evaluator = Evaluator(MixedResults())
    got = evaluator.evaluate(evaluator.update(evaluator.init(), DATA["logits"], DATA))
    assert got["per_class"].tolist() == [1.0, 1.0, 1.0]
    assert (got["best"], got["mean"]) == ("a", 1.0)
    assert type(got["mean"]) is float


@pytest.mark.parametrize(
    ("metrics", "error", "words", "path"),
    [
        ([], ValueError, ["got none"], None),
        (
            3,
            TypeError,
            ["BaseMetric", "flax.nnx", "'type'", "got int"],
            None,
        ),
        ({"metrics": "Acuracy"}, KeyError, ["did you mean 'Accuracy'"], "metrics.type"),
        ({"metrics": [{"type": "Acuracy"}]}, KeyError, ["did you mean 'Accuracy'"], "metrics[0].type"),
        ([{"type": "Acuracy"}], KeyError, ["did you mean 'Accuracy'"], "[0].type"),
        (
            [Accuracy(), {"type": "Accuracy", "top": 1}],
            TypeError,
            ["'top'", "did you mean 'topk'"],
            "[1]",
        ),
    ],
)
def test_illegal_metrics_raise_with_their_config_path(metrics, error, words, path):
    check_refusal(lambda: build_evaluator(metrics), error, *words, *([f"`{path}`"] if path else []))


def test_results_of_a_sharded_batch_match_those_of_one_device():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    evaluator = Evaluator([Accuracy(), MeanLoss(cross_entropy)])
    (batch,) = DataLoader(ArrayDataset(DATA), 48)
    sharded_batch = jax.device_put(batch, sharding)
    state = jax.device_put(evaluator.init(), jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec()))
    got = evaluator.evaluate(jax.jit(evaluator.update)(state, sharded_batch["logits"], sharded_batch))
    expected = evaluator.evaluate(evaluator.update(evaluator.init(), batch["logits"], batch))
    assert got["accuracy/top1"] == expected["accuracy/top1"]
    assert got["loss"] == pytest.approx(expected["loss"], rel=3e-7)


def test_the_built_in_metrics_are_registered():
    assert {"Accuracy", "MeanLoss"} <= set(METRICS)


def test_a_metric_is_found_by_its_full_or_its_last_name():
    metrics = {"clean/accuracy/top1": 0.5, "robust/accuracy/top1": 0.25, "loss": 2.0, "clean/loss": 3.0}
    assert get_metric_value("robust/accuracy/top1", metrics) == 0.25
    assert get_metric_value("loss", metrics) == 2.0
    with pytest.raises(KeyError, match="got 'top1', which matches clean/accuracy/top1, robust/accuracy/top1"):
        get_metric_value("top1", metrics)
    with pytest.raises(KeyError, match="got 'top5', not in clean"):
        get_metric_value("top5", metrics)


def test_the_evaluation_says_how_many_predictions_are_not_numbers(caplog):
    logits = DATA["logits"].copy()
    logits[[3, 9, 44], 2] = np.nan
    right = DATA["logits"].argmax(1) == DATA["label"]
    assert right[[3, 9, 44]].any()
    for data, said, accuracy in (
        ({**DATA, "logits": logits}, ["predictions of 3 of 45 examples"], np.delete(right, [3, 9, 44]).sum() / 45),
        (DATA, [], right.mean()),
    ):
        caplog.clear()
        metrics = evaluate(Evaluator(Accuracy()), DataLoader(ArrayDataset(data), 32))  # with padding, which does not count
        assert metrics["accuracy/top1"] == pytest.approx(accuracy)
        assert [words in record.getMessage() for words, record in zip(said, caplog.records, strict=True)] == [True] * len(said)


def test_a_nan_in_any_entry_of_the_predictions_counts_its_example_once(caplog):
    evaluator = Evaluator(Accuracy(prediction="logits"))
    logits, boxes = np.zeros((4, 2), np.float32), np.zeros((4, 2, 2), np.float32)
    logits[0] = boxes[0] = boxes[2, 1, 0] = boxes[3] = np.nan
    batch = {"label": np.zeros(4, np.int32), "mask": np.array([True, True, True, False])}
    for more, count in (({"ids": np.arange(4)}, 2), ({"temperature": np.float32(np.nan)}, 3)):
        caplog.clear()
        state = evaluator.update(evaluator.init(), {"logits": logits, "boxes": boxes, **more}, batch)
        assert evaluator.evaluate(state)["accuracy/top1"] == pytest.approx(2 / 3)
        assert f"predictions of {count} of 3 examples" in caplog.text
