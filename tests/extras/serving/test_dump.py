import pickle

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import METRICS
from jengine.data import ArrayDataset, DataLoader
from jengine.evaluation import Accuracy, Evaluator, MeanLoss

SIZE = 45
rng = np.random.RandomState(0)
DATA = {"logits": rng.normal(size=(SIZE, 6)).astype(np.float32), "label": rng.randint(0, 6, SIZE).astype(np.int32)}


def cross_entropy(predictions, batch):
    return -jnp.take_along_axis(jax.nn.log_softmax(predictions), batch["label"][:, None], axis=1)[:, 0]


@pytest.mark.parametrize("name", ["predictions.pkl", "predictions.npz"])
def test_dumped_predictions_are_evaluated_later_with_the_same_results(name, tmp_path):
    metrics = [Accuracy(topk=(1, 3)), MeanLoss(cross_entropy)]
    path = tmp_path / "new" / name
    evaluator = Evaluator([*metrics, {"type": "DumpResults", "out_file_path": str(path)}])
    update = jax.jit(evaluator.update)
    state = evaluator.init()
    for batch in DataLoader(ArrayDataset(DATA), 16):
        state = update(state, batch["logits"], batch)
        evaluator.process_host(jnp.asarray(batch["logits"]), batch)
    expected = evaluator.evaluate(state)
    predictions = np.load(path)["predictions"] if name.endswith("npz") else pickle.loads(path.read_bytes())
    assert len(predictions) == SIZE
    got = Evaluator(metrics).offline_evaluate(predictions, DATA, chunk_size=7)
    assert got == {**expected, "loss": pytest.approx(expected["loss"], rel=3e-7)}
    samples = [{"scores": row, "label": label} for row, label in zip(predictions, DATA["label"], strict=True)]
    assert Evaluator(Accuracy(prediction="scores")).offline_evaluate(samples)["accuracy/top1"] == got["accuracy/top1"]


def test_dumping_predictions_does_not_hide_the_names_of_the_other_results():
    assert Evaluator([Accuracy(), {"type": "DumpResults", "out_file_path": "x.pkl"}]).names == ("accuracy/top1",)
    with pytest.raises(ValueError, match=r"must end with .pkl, .pickle or .npz, got 'x.json'"):
        METRICS.build({"type": "DumpResults", "out_file_path": "x.json"})
