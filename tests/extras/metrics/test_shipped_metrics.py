"""The metrics equal scikit-learn's, whatever the batch size and the padding."""


import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jengine.config import METRICS
from jengine.data import ArrayDataset, DataLoader
from jengine.evaluation import Accuracy, Evaluator
from jengine.extras.metrics import (
    AUROC,
    BLEU,
    AveragePrecision,
    BitsPerByte,
    CalibrationError,
    ConfusionMatrix,
    IoUMetric,
    MeanAbsoluteError,
    MeanSquaredErrorMetric,
    Perplexity,
    PrecisionRecallF1,
    R2Score,
)
from tests.refusals import check_refusal

SIZE, CLASSES = 61, 5
ITEMS = ("precision", "recall", "f1")


@pytest.fixture(scope="module", autouse=True)
def scikit_learn():
    """Import scikit-learn where these tests run: each process that collects tests would take a second for it."""
    global sklearn
    from sklearn import metrics as sklearn


def softmax(logits):
    weights = np.exp(logits.astype(np.float64) - logits.max(axis=-1, keepdims=True))
    return weights / weights.sum(axis=-1, keepdims=True)


def make_data(seed, absent=()):
    """Return logits and scores with ties, and labels without the classes `absent`."""
    rng = np.random.RandomState(seed)
    present = [c for c in range(CLASSES) if c not in absent]
    logits = rng.randint(-3, 4, (SIZE, CLASSES)).astype(np.float32) / 2
    logits[:, list(absent)] -= 9
    return {
        "logits": logits + rng.normal(size=(1, CLASSES)).astype(np.float32) / 9,
        "label": rng.choice(present, SIZE).astype(np.int32),
        "score": rng.randint(0, 9, SIZE).astype(np.float32) / 8,
        "binary": rng.randint(0, 2, SIZE).astype(np.int32),
        "labels": rng.randint(0, 2, (SIZE, CLASSES)).astype(np.int32),
        "target": (1e3 + rng.normal(size=(SIZE, 2))).astype(np.float32),
        "estimate": (1e3 + rng.normal(size=(SIZE, 2))).astype(np.float32),
    }


def evaluate(metrics, data, batch_size=SIZE):
    evaluator = Evaluator(metrics)
    update, state = jax.jit(evaluator.update), evaluator.init()
    for batch in DataLoader(ArrayDataset(data), batch_size):
        predictions = {name: batch[name] for name in batch if name != "mask"}
        state = update(state, predictions, batch)
        evaluator.process_host(predictions, batch)
    return evaluator.evaluate(state)


def classification_metrics():
    logits, score = {"num_classes": CLASSES, "prediction": "logits"}, {"prediction": "score", "label": "binary"}
    return [
        ConfusionMatrix(**logits),
        ConfusionMatrix(**logits, normalize="true", prefix="rows"),
        PrecisionRecallF1(**logits, average=("micro", "macro", "weighted", "none")),
        PrecisionRecallF1(2, average="binary", threshold=0.5, **score),
        PrecisionRecallF1(
            CLASSES,
            ("micro", "macro", "weighted"),
            prediction="logits",
            label="labels",
            multilabel=True,
            threshold=0.0,
            prefix="several",
        ),
        AUROC(**score),
        AveragePrecision(**score),
        AUROC(prediction="logits", prefix="macro"),
        AUROC("weighted", prediction="logits", prefix="weighted"),
        AveragePrecision(prediction="logits", prefix="macro"),
        AUROC(prediction="logits", label="labels", prefix="several"),
        AveragePrecision("none", prediction="logits", label="labels", prefix="several"),
        CalibrationError(10, prediction="logits"),
    ]


def expected_scores(labels, predicted, average, prefix="", **arguments):
    values = sklearn.precision_recall_fscore_support(labels, predicted, average=average, zero_division=0, **arguments)
    return {f"{prefix}{item}_{average}": value for item, value in zip(ITEMS, values, strict=False)}


def expected_calibration_error(probabilities, labels, num_bins):
    """Return the definition of Guo et al., in float64."""
    confidence, correct = probabilities.max(axis=1), probabilities.argmax(axis=1) == labels
    gaps, shares = [], []
    for low in np.arange(num_bins) / num_bins:
        inside = (confidence > low) & (confidence <= low + 1 / num_bins)
        if inside.any():
            gaps.append(abs(correct[inside].mean() - confidence[inside].mean()))
            shares.append(inside.mean())
    return {"ece": np.dot(gaps, shares), "mce": max(gaps)}


@pytest.mark.parametrize("batch_size", [8, 64])
@pytest.mark.parametrize("absent", [(), (2,)])
def test_classification_equals_scikit_learn(batch_size, absent):
    data = make_data(0, absent)
    got = evaluate(classification_metrics(), data, batch_size)
    labels, predicted, probabilities = data["label"], data["logits"].argmax(axis=1), softmax(data["logits"])
    several, decisions = data["labels"], data["logits"] > 0
    matrix = sklearn.confusion_matrix(labels, predicted, labels=range(CLASSES))
    expected = expected_calibration_error(probabilities, labels, 10)
    for average in ("micro", "macro", "weighted"):
        expected |= expected_scores(labels, predicted, average)
        expected |= expected_scores(several, decisions, average, "several/")
    expected |= expected_scores(data["binary"], data["score"] > 0.5, "binary")
    expected["auroc"] = sklearn.roc_auc_score(data["binary"], data["score"])
    expected["average_precision"] = sklearn.average_precision_score(data["binary"], data["score"])
    present = np.unique(labels)
    one_against_rest = [sklearn.roc_auc_score(labels == c, probabilities[:, c]) for c in present]
    expected["macro/auroc"] = np.mean(one_against_rest)
    expected["weighted/auroc"] = np.dot(one_against_rest, np.bincount(labels)[present]) / SIZE
    precisions = [sklearn.average_precision_score(labels == c, probabilities[:, c]) for c in present]
    expected["macro/average_precision"] = np.mean(precisions)
    expected["several/auroc"] = sklearn.roc_auc_score(several, data["logits"])
    arrays = {name: got.pop(name) for name in list(got) if np.ndim(got[name])}
    assert got == pytest.approx(expected, rel=1e-6)
    assert arrays["confusion_matrix"].tolist() == matrix.tolist()
    rows = sklearn.confusion_matrix(labels, predicted, labels=range(CLASSES), normalize="true")
    np.testing.assert_allclose(arrays["rows/confusion_matrix"], rows, rtol=1e-12)
    by_class = sklearn.precision_recall_fscore_support(labels, predicted, labels=range(CLASSES), zero_division=0)
    np.testing.assert_allclose(arrays["f1_none"], by_class[2], rtol=1e-12)
    by_class = [sklearn.average_precision_score(several[:, c], data["logits"][:, c]) for c in range(CLASSES)]
    np.testing.assert_allclose(arrays["several/average_precision"], by_class, rtol=1e-12)


def test_scikit_learn_agrees_on_one_against_the_rest():  # with its own multiclass option
    data = make_data(1)
    got = evaluate([AUROC(prediction="logits"), AUROC("weighted", prediction="logits", prefix="w")], data)
    for name, average in (("auroc", "macro"), ("w/auroc", "weighted")):
        expected = sklearn.roc_auc_score(data["label"], softmax(data["logits"]), multi_class="ovr", average=average)
        assert got[name] == pytest.approx(expected, rel=1e-12)


def test_a_single_class_has_no_area():
    data = {**make_data(2), "binary": np.ones(SIZE, np.int32), "label": np.full(SIZE, 3, np.int32)}
    got = evaluate(classification_metrics(), data, 16)
    assert np.isnan(got["auroc"])
    assert np.isnan(got["macro/auroc"])
    assert got["average_precision"] == 1
    assert got["macro/average_precision"] == 1
    predicted = data["logits"].argmax(axis=1)
    assert got["f1_macro"] == pytest.approx(sklearn.f1_score(data["label"], predicted, average="macro"), rel=1e-12)
    assert got["recall_weighted"] == (predicted == 3).mean()


def test_two_logits_give_the_binary_scores():
    data = make_data(3)
    logits = np.stack([np.zeros(SIZE), data["score"]], axis=1).astype(np.float32)
    got = evaluate(AUROC(prediction="logits", label="binary"), {**data, "logits": logits})
    assert got["auroc"] == pytest.approx(sklearn.roc_auc_score(data["binary"], data["score"]), rel=1e-12)


@pytest.mark.parametrize(
    "metric", [ConfusionMatrix(3, prediction="p"), AUROC(prediction="s"), CalibrationError(prediction="s")]
)
def test_ignored_labels_do_not_count(metric):
    rng = np.random.RandomState(0)
    data = {"p": rng.randint(0, 3, 9), "s": rng.normal(size=(9, 3)).astype(np.float32), "label": np.arange(9) % 3}
    metric.ignore_index = 255
    expected = evaluate(metric, data)
    more = {name: np.concatenate([x, x[:2]]) for name, x in data.items()}
    more["label"][-2:] = 255
    got = evaluate(metric, more)
    for name, value in expected.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-6)


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_out_of_range_makes_every_result_nan(label):
    metrics = [ConfusionMatrix(3, prediction="s"), PrecisionRecallF1(3, prediction="s"), AUROC(prediction="s")]
    metrics += [AveragePrecision(prediction="s"), CalibrationError(prediction="s")]
    scores = np.random.RandomState(0).normal(size=(4, 3)).astype(np.float32)
    got = evaluate(metrics, {"s": scores, "label": np.array([0, 1, label, 2])}, 3)
    assert len(got) == 8
    assert all(np.isnan(value).all() for value in got.values())


@pytest.mark.parametrize("batch_size", [8, 64])
def test_regression_equals_scikit_learn(batch_size):
    data = make_data(4)
    kinds = [MeanSquaredErrorMetric, MeanAbsoluteError, R2Score]
    metrics = [
        *(kind(prediction="estimate") for kind in kinds),
        MeanSquaredErrorMetric(prediction="estimate", root=True),
    ]
    got = evaluate(metrics, data, batch_size)
    target, estimate = (data[name].astype(np.float64).ravel() for name in ("target", "estimate"))
    assert got == pytest.approx(
        {
            "mse": sklearn.mean_squared_error(target, estimate),
            "mae": sklearn.mean_absolute_error(target, estimate),
            "r2": sklearn.r2_score(target, estimate),
            "rmse": sklearn.root_mean_squared_error(target, estimate),
        },
        rel=1e-6,
    )


@pytest.mark.parametrize(("shift", "expected"), [(0, 1.0), (1, 0.0)])
def test_r2_of_constant_targets_is_as_in_scikit_learn(shift, expected):
    target = np.full(7, 0.5, np.float32)
    got = evaluate(R2Score(prediction="p"), {"target": target, "p": target + np.float32(shift)}, 4)
    assert got["r2"] == expected == sklearn.r2_score(target, target + np.float32(shift))


@pytest.mark.parametrize("batch_size", [2, 8])
def test_perplexity_and_bits_per_byte_are_means_over_tokens_and_bytes(batch_size):
    rng = np.random.RandomState(5)
    logits, labels = rng.normal(size=(7, 4, 6)).astype(np.float32), rng.randint(0, 6, (7, 4))
    labels[:3, 2:] = -1
    num_bytes = rng.randint(1, 5, (7, 4))
    data = {"logits": logits, "label": labels, "num_bytes": num_bytes, "text_bytes": num_bytes.sum(axis=1)}
    arguments = {"prediction": "logits", "ignore_index": -1}
    metrics = [Perplexity(**arguments), BitsPerByte(**arguments), BitsPerByte("text_bytes", prefix="text", **arguments)]
    got = evaluate(metrics, data, batch_size)
    losses = -np.log(np.take_along_axis(softmax(logits), np.maximum(labels, 0)[..., None], axis=-1)[..., 0])
    counts = labels >= 0
    assert got["perplexity"] == pytest.approx(np.exp(losses[counts].mean()), rel=1e-6)
    assert got["bits_per_byte"] == pytest.approx(losses[counts].sum() / np.log(2) / num_bytes[counts].sum(), rel=1e-6)
    assert got["text/bits_per_byte"] == pytest.approx(losses[counts].sum() / np.log(2) / num_bytes.sum(), rel=1e-6)


def test_perplexity_of_an_illegal_token_is_nan():
    metric = Perplexity()
    assert np.isnan(
        metric.compute(metric.update(metric.init(), jnp.zeros((1, 2, 4)), {"label": jnp.array([[0, 4]])}))["perplexity"]
    )


@pytest.mark.foreign
def test_bleu_equals_sacrebleu_of_the_whole_corpus():
    sacrebleu = pytest.importorskip("sacrebleu")
    words = np.array(["the", "cat", "dog", "sat", "on", "mat", "here"])
    tokens = np.random.RandomState(0).randint(0, 7, (5, 8))
    texts = [" ".join(words[row]) for row in tokens]
    references = np.array([[text, text.replace("cat", "dog")] for text in texts[1:] + texts[:1]])
    metric = BLEU(prediction="tokens", decode=lambda row: " ".join(words[row]))
    evaluator = Evaluator(metric)
    state = evaluator.init()
    for rows, mask in (([0, 1, 2], [True] * 3), ([3, 4, 4], [True, True, False])):
        batch = {"reference": references[rows], "mask": np.array(mask)}
        state = evaluator.update(state, {"tokens": tokens[rows]}, {"mask": batch["mask"]})
        evaluator.process_host({"tokens": tokens[rows]}, batch)
    got = evaluator.evaluate(state)
    expected = sacrebleu.corpus_bleu(texts, list(map(list, references.T))).score
    assert got == {"bleu": pytest.approx(expected)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"type": "ConfusionMatrix", "num_classes": 1}, ["`num_classes`", "at least 2", "got 1"]),
        ({"type": "PrecisionRecallF1", "average": "makro"}, ["average"]),
        ({"type": "PrecisionRecallF1", "multilabel": True}, ["`threshold`", "multilabel=True"]),
        ({"type": "AUROC", "average": "micro"}, ["average"]),
    ],
)
def test_illegal_arguments_raise(arguments, words):
    check_refusal(lambda: METRICS.build(arguments), (ValueError, TypeError), *words)


# --- Scores that are not numbers: no class ---


def with_nan(scores, rows):
    scores = np.array(scores, np.float32)
    scores[rows] = np.nan
    return scores


def test_nan_scores_are_a_prediction_of_no_class():
    labels = np.array([0] * 9 + [1])
    logits = with_nan(np.eye(2)[labels], slice(0, 6))  # the other four are right
    two = dict(num_classes=2, prediction="logits")
    metrics = [
        Accuracy(prediction="logits"),
        PrecisionRecallF1(**two, average=("micro", "none")),
        ConfusionMatrix(**two),
        IoUMetric(**two),
    ]
    got = evaluate(metrics, {"logits": logits, "label": labels}, batch_size=4)
    assert got["accuracy/top1"] == got["recall_micro"] == got["aAcc"] == 0.4
    assert got["confusion_matrix"].tolist() == [[3, 0], [0, 1]]
    assert got["precision_none"].tolist() == [1, 1]
    assert got["recall_none"].tolist() == [3 / 9, 1]
    assert got["mIoU"] == pytest.approx((3 / 9 + 1) / 2)


def test_a_nan_score_of_two_classes_is_not_below_the_threshold():
    metric = ConfusionMatrix(num_classes=2, threshold=0.5)
    scores, labels = jnp.array([jnp.nan, 0.2, 0.7]), {"label": jnp.array([0, 0, 1])}
    matrix = metric.compute(jax.device_get(metric.update(metric.init(), scores, labels)))["confusion_matrix"]
    assert matrix.tolist() == [[1, 0], [0, 1]]


def test_several_labels_with_a_nan_score_are_not_predicted():
    metric = PrecisionRecallF1(num_classes=2, multilabel=True, threshold=0.0, average="micro")
    scores = jnp.array([[jnp.nan, 1.0], [1.0, jnp.nan]])
    state = metric.update(metric.init(), scores, {"label": jnp.array([[1, 1], [1, 0]])})
    assert metric.compute(jax.device_get(state))["recall_micro"] == pytest.approx(2 / 3)


@pytest.mark.parametrize("logits", [True, False])
def test_a_nan_is_wrong_with_full_confidence_for_the_calibration(logits):
    metric = CalibrationError(num_bins=4, from_logits=logits)
    scores = with_nan([[0.5, 0.5], [0.5, 0.5], [0.5, 0.5], [0.5, 0.5]], [0, 1])
    state = metric.update(metric.init(), jnp.asarray(scores), {"label": jnp.array([0, 1, 0, 1])})
    got = metric.compute(jax.device_get(state))
    assert got == {"ece": 0.5, "mce": 1.0}  # two of four are off by 1, the others are calibrated
    broken = metric.update(metric.init(), jnp.full((4, 2), jnp.nan), {"label": jnp.array([0, 1, 0, 1])})
    assert metric.compute(jax.device_get(broken))["ece"] == 1.0


def test_a_positive_example_with_a_nan_score_is_never_found():
    label = np.array([1, 1, 0, 0])
    for scores, auroc, precision in (
        ([0.9, 0.8, 0.1, 0.2], 1.0, 1.0),
        ([np.nan, 0.8, 0.1, 0.2], 0.5, 0.5),
        ([0.9, 0.8, np.nan, 0.2], 1.0, 1.0),
        ([np.nan, 0.8, np.nan, np.nan], 0.5, 0.5),
        ([np.nan] * 4, 0.0, 0.0),
    ):
        got = []
        for metric in (AUROC(), AveragePrecision()):
            metric.process({"label": label}, np.array(scores, np.float32))
            got += metric.collect(None).values()
        assert got == [auroc, precision], scores


def test_one_nan_among_the_scores_of_a_row_is_no_class_for_all_classes():
    scores = np.array([[np.nan, 0.0, 9.0], [9.0, 0.0, 0.0], [0.0, 9.0, 0.0], [0.0, 0.0, 9.0]], np.float32)
    metric = AveragePrecision("none", from_logits=False)
    metric.process({"label": np.array([2, 0, 1, 2])}, scores)
    assert metric.collect(None)["average_precision"].tolist() == [1, 1, 0.5]


def test_a_constant_target_has_no_score_for_predictions_that_are_not_numbers():
    metric = R2Score()
    state = metric.update(metric.init(), jnp.array([jnp.nan, 1.0]), {"target": jnp.ones(2)})
    assert np.isnan(metric.compute(jax.device_get(state))["r2"])
