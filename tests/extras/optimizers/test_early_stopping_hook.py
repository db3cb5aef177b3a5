import math

import pytest

from jengine.config import HOOKS
from jengine.hooks import EarlyStoppingHook
from tests.refusals import check_refusal
from tests.runner_fixture import QuickRunner


@pytest.fixture
def make(tmp_path):
    """Return a function that makes a QuickRunner with a hook and the metrics of each validation."""
    return lambda hook, validations: QuickRunner(
        tmp_path / "run", [hook], epochs=max(len(validations), 1), epoch_length=1, validations=validations
    )


@pytest.fixture
def count_epochs(make):
    """Return a function that returns the number of validations until training ends; None if it does not."""

    def count_epochs(scores, key="acc", hook=None, **settings):
        hook = hook or EarlyStoppingHook(**{"monitor": key, "min_delta": 0.1, **settings})
        runner = make(hook, [{key: score} for score in scores])
        runner.train()
        return runner.epoch if runner.train_loop.stop_training else None

    return count_epochs


def test_training_ends_when_the_metric_does_not_improve(count_epochs):
    # MMEngine's own case: the best is 92 at epoch 3, three epochs without an improvement end it after the sixth
    assert count_epochs([90, 91, 92, 88, 89, 90, 99], min_delta=1, patience=3) == 6


@pytest.mark.parametrize(
    ("scores", "settings", "expected"),
    [
        ([1.0] * 9, dict(), 6),  # the first is an improvement, then five are not
        ([1.0] * 9, dict(patience=3), 4),
        ([1.0, 2.0, 2.0, 3.0], dict(patience=0), 3),  # as 1
        ([1, 1, 1.5, 1.5, 1.5, 2], dict(patience=3, min_delta=0.5), 4),  # best + min_delta must be exceeded
        ([0.5] * 9, dict(patience=2, min_delta=0.0), 3),  # an equal score is no improvement
        ([0.5] * 9, dict(key="loss", patience=2, min_delta=0.0), 3),
        ([-1.0, -2.0, -2.0, -2.0], dict(patience=3, min_delta=0.0), 4),
        ([1.0, 1.05, 1.05], dict(patience=2), 3),
        ([1.0, 1.05, 1.1], dict(patience=2, min_delta=0.05), None),
        ([3.0, 2.0, 1.95, 1.95], dict(key="loss", patience=2), 4),
        ([3.0, 2.0, 1.875, 1.9], dict(key="loss", patience=2), None),
        ([3.0, 2.0, 3.0], dict(key="fid", rule="less", patience=1), 3),
        ([1.0, math.nan], dict(), 2),
        ([1.0, math.inf], dict(), 2),
        ([1.0, math.nan, math.nan, 2.0], dict(check_finite=False, patience=2), 3),  # NaN improves nothing
        ([0.5, 0.9, 0.91], dict(stopping_threshold=0.9), 3),  # strictly beyond
        ([0.5, 0.1], dict(key="loss", stopping_threshold=0.2), 2),
    ],
)
def test_when_training_ends(count_epochs, scores, settings, expected):
    assert count_epochs(scores, **settings) == expected


def test_a_restored_hook_continues_counting(count_epochs):
    scores = [1.0, 2.0, 1.0, 1.0, 1.0]
    assert count_epochs(scores, patience=3) == 5
    before = EarlyStoppingHook("acc", min_delta=0.1, patience=3)
    assert count_epochs(scores[:3], hook=before) is None
    assert before.state_dict() == {"best_score": 2.0, "wait_count": 1}
    after = EarlyStoppingHook("acc", min_delta=0.1, patience=3)
    after.load_state_dict(before.state_dict())
    assert count_epochs(scores[3:], hook=after) == 2


def test_a_missing_metric_is_a_warning_or_an_error(make, caplog):
    hook = EarlyStoppingHook("acc", min_delta=0.1)
    make(hook, [{"ac": 1.0}]).train()
    assert "must be a metric of the validation, got 'acc'; did you mean 'ac'?" in caplog.text
    assert hook.state_dict() == {"best_score": None, "wait_count": 0}
    strict = EarlyStoppingHook("acc", min_delta=0.1, strict=True)
    with pytest.raises(RuntimeError, match="got 'acc'; expected one of: loss"):
        make(strict, [{"loss": 1.0}]).train()


def test_validations_outside_training_do_not_count(make):
    runner = make(EarlyStoppingHook("acc", min_delta=0.1), [{"acc": 0.5}])
    runner.val_loop.metrics = [{"acc": math.nan}, {"acc": 0.5}, {"acc": math.nan}]
    runner.val_loop.run()
    runner.train()
    runner.val_loop.run()
    assert runner.val_loop.metrics == []
    assert not runner.train_loop.stop_training


def test_the_default_of_min_delta_logs_a_warning(make, caplog):
    hook = EarlyStoppingHook("acc")
    assert hook.min_delta == 0.1
    make(hook, []).train()
    assert "only improvements of 'acc' by more than 0.1 count" in caplog.text
    caplog.clear()
    make(EarlyStoppingHook("acc", min_delta=0.1), []).train()
    assert "only improvements" not in caplog.text


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (dict(monitor="acc", rule="bigger"), ValueError, ["rule`", "'greater'", "'less'", "None", "got 'bigger'"]),
        (dict(monitor="score"), ValueError, ["the name", "pass rule="]),
        (dict(monitor="acc", patience=-1), ValueError, ["patience`", "at least 0", "got -1"]),
        (dict(monitor="acc", patience=1.5), TypeError, ["patience`", "at least 0", "got 1.5"]),
        (dict(), TypeError, ["'monitor'"]),
        (dict(monitor="acc", patient=1), TypeError, ["mean 'patience"]),
    ],
)
def test_invalid_arguments_are_refused_with_the_legal_values(arguments, error, words):
    check_refusal(lambda: HOOKS.build(dict(type="EarlyStoppingHook", **arguments)), error, *words)


def test_a_validation_alone_needs_no_loop_to_stop(make):
    make(EarlyStoppingHook("acc"), []).call_hook("before_run")
