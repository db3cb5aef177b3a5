import math

import pytest

from jengine.config import METRICS
from jengine.config.scores import infer_rule, is_better, keep_best, pick_metric
from jengine.evaluation import BaseMetric
from jengine.extras import language, metrics


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("top-1", "greater"),
        ("accuracy/top1", "greater"),
        ("accuracy/top1_ema", "greater"),
        ("mIoU", "greater"),
        ("coco/bbox_mAP", "greater"),
        ("mAP_50", "greater"),
        ("coco/AR@100", "greater"),
        ("recall_at_5", "greater"),
        ("ACC", "greater"),
        ("loss", "less"),
        ("Loss", "less"),
        ("val_loss", "less"),
        ("val_perplexity", "less"),
        ("mean_squared_error", "less"),
        ("MAPE", "less"),
        ("accumulated_error", "less"),
        ("top5_error", "less"),  # the qualifier of an error
        ("error_top1", "less"),
        ("hits@10", "greater"),
        ("bleu-4", "greater"),
        ("rougeL", "greater"),
        ("eval_exact_match", "greater"),
        ("acc_norm,none", "greater"),
        ("fpr95", "less"),
        ("false_positive_rate", "less"),
        ("hamming_loss", "less"),
        ("categorical_crossentropy", "less"),
        ("val/latency_ms", "less"),
    ],
)
def test_the_rule_is_inferred_from_whole_words(key, rule):
    assert infer_rule(key) == rule


@pytest.mark.parametrize("evaluation", ["desktop", "stop", "topic", "accuracy", "top", "loss", "map"])
def test_the_name_of_the_evaluation_does_not_matter(evaluation):
    assert infer_rule(f"{evaluation}/loss") == "less"
    assert infer_rule(f"{evaluation}/accuracy/top1") == "greater"
    assert infer_rule(f"{evaluation}/perplexity") == "less"


@pytest.mark.parametrize(
    "key",
    [
        "score",
        "inaccuracy",
        "closs",
        "glossary",
        "desktop",
        "map/score",
        "accuracy_loss",  # a loss of accuracy, or an accuracy of a loss?
        "error/top1",
        "neg_mean_squared_error",  # as scikit-learn calls it: greater is better
        "accuracy_gap",
        "confusion_matrix",
        "1-ssim",
        "100 - accuracy",
        "acc_stderr,none",
        "accuracy_time",
        "best_f1_threshold",
        "brier_skill_score",
        "loss_scale",
    ],
)
def test_any_other_name_asks_for_the_rule(key):
    with pytest.raises(ValueError, match=f"'{key}' .*pass rule='greater' or rule='less'"):
        infer_rule(key)


def test_the_keys_of_the_user_come_first_and_match_whole_words():
    assert infer_rule("accuracy_loss", less_keys=("accuracy_loss",)) == "less"
    assert infer_rule("accuracy_loss", greater_keys=("accuracy",)) == "greater"
    assert infer_rule("coco/my_score", greater_keys=("score",)) == "greater"
    assert infer_rule("my_bits_left", less_keys=("Bits_Left",)) == "less"
    assert infer_rule("accuracy", less_keys=("accuracy",)) == "less"
    with pytest.raises(ValueError, match="cannot infer"):
        infer_rule("underscored", greater_keys=("score",))


def test_all_metrics_of_the_package_have_a_direction():
    assert language.TextScore
    assert metrics.IoUMetric
    arguments = {
        "MeanLoss": dict(loss=lambda predictions, batch: predictions),
        "PrecisionRecallF1": dict(average=("micro", "macro", "weighted", "binary", "none")),
    }
    directions = {}
    for kind in ("Accuracy", "MeanLoss", "PrecisionRecallF1", "CalibrationError", "AUROC", "AveragePrecision",
                 "Perplexity", "BitsPerByte", "MeanSquaredError", "MeanAbsoluteError", "R2Score", "IoUMetric",
                 "TextScore"):  # fmt: skip
        metric = METRICS.build({"type": kind, **arguments.get(kind, {})})
        assert isinstance(metric, BaseMetric)
        directions |= {name: infer_rule(metric.add_prefix(name)) for name in metric.names}
    directions |= {name: infer_rule(name) for name in ("rmse", "bleu")}
    less = {name for name, rule in directions.items() if rule == "less"}
    assert less == {"loss", "ece", "mce", "perplexity", "bits_per_byte", "mse", "rmse", "mae"}
    assert {"top1", "f1_macro", "auroc", "average_precision", "r2", "aAcc", "mIoU", "exact_match"} <= set(directions)


def test_only_a_strict_improvement_is_better():
    assert is_better("greater", 0.5, None)
    assert is_better("greater", 0.6, 0.5)
    assert not is_better("greater", 0.5, 0.5)
    assert is_better("less", 0.4, 0.5)
    assert not is_better("less", 0.5, 0.5)


def test_an_improvement_must_be_larger_than_the_threshold():
    assert not is_better("greater", 1.5, 1.0, threshold=0.5)
    assert is_better("greater", 1.75, 1.0, threshold=0.5)
    assert not is_better("less", -1.5, -1.0, threshold=0.5)
    assert is_better("less", -1.75, -1.0, threshold=0.5)


def test_nan_is_never_better():
    assert not is_better("greater", math.nan, None)
    assert not is_better("less", math.nan, 1.0)


@pytest.mark.parametrize(
    ("scores", "count", "rule", "kept"),
    [
        ([0.5, 0.9, 0.7], 1, "greater", [1]),
        ([0.5, 0.9, 0.7], 2, "greater", [1, 2]),
        ([0.5, 0.9, 0.7], 2, "less", [0, 2]),
        ([0.5, 0.9, 0.7], 5, "less", [0, 2, 1]),
        ([0.7, 0.7], 1, "greater", [0]),  # the first of equals
        ([0.7, 0.7], 1, "less", [0]),
        ([math.nan, None, 0.7, math.inf], 4, "less", [2, 3]),
        ([], 1, "less", []),
    ],
)
def test_the_best_are_kept_and_come_first(scores, count, rule, kept):
    assert keep_best(scores, count=count, rule=rule) == kept


def test_a_metric_is_picked_by_name():
    assert pick_metric({"acc": 0.5, "f1": None}, "acc") == 0.5
    assert pick_metric({"acc": 0.5, "f1": None}, "f1") is None
    with pytest.raises(KeyError, match=r"no metric 'ac'; did you mean 'acc'\? \(returned: acc, f1\)"):
        pick_metric({"acc": 0.5, "f1": None}, "ac")
    with pytest.raises(TypeError, match="'acc' must be a number, got 'high'"):
        pick_metric({"acc": "high"}, "acc")
