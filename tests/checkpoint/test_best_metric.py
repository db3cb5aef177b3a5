import pytest

from jengine.checkpoint import infer_rule, is_better, pick_metric


@pytest.mark.parametrize(
    ("key", "rule"),
    [
        ("top-1", "greater"),
        ("mIoU", "greater"),
        ("coco/bbox_mAP", "greater"),
        ("loss", "less"),
        ("val_loss", "less"),
        ("accuracy_loss", "greater"),  # MMEngine: a match in greater_keys wins over one in less_keys
        ("ACC", "greater"),
    ],
)
def test_the_rule_is_inferred_from_the_name(key, rule):
    assert infer_rule(key) == rule


def test_an_equal_name_wins_over_a_part():
    assert infer_rule("accuracy_loss", less_keys=("accuracy_loss",)) == "less"


def test_an_unknown_name_is_an_error_that_names_the_rules_to_pass():
    with pytest.raises(ValueError, match=r"'val_perplexity' .*pass rule='greater' or rule='less'"):
        infer_rule("val_perplexity")


def test_only_a_strict_improvement_is_better():
    assert is_better("greater", 0.5, None)
    assert is_better("greater", 0.6, 0.5)
    assert not is_better("greater", 0.5, 0.5)
    assert is_better("less", 0.4, 0.5)
    assert not is_better("less", 0.5, 0.5)


def test_nan_is_never_better():
    assert not is_better("greater", float("nan"), None)
    assert not is_better("less", float("nan"), 1.0)


def test_a_metric_is_picked_by_name():
    assert pick_metric({"acc": 0.5, "f1": None}, "acc") == 0.5
    assert pick_metric({"acc": 0.5, "f1": None}, "f1") is None
    with pytest.raises(KeyError, match=r"no metric 'ac'; did you mean 'acc'\? \(returned: acc, f1\)"):
        pick_metric({"acc": 0.5, "f1": None}, "ac")
    with pytest.raises(TypeError, match="'acc' must be a number, got 'high'"):
        pick_metric({"acc": "high"}, "acc")
