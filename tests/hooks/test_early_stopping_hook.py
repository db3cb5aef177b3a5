import logging
import math
import types

import pytest

from jengine.hooks import EarlyStoppingHook
from jengine.logging import MessageHub
from jengine.registry import HOOKS

LOGGER = logging.getLogger("test_early_stopping_hook")


def fake_runner():
    loop = types.SimpleNamespace(stop_training=False)
    return types.SimpleNamespace(train_loop=loop, logger=LOGGER, message_hub=MessageHub("fake"))


def count_epochs(scores, key="acc", hook=None, **settings):
    """Return the number of validations until training ends; None if it does not."""
    hook = hook or EarlyStoppingHook(**{"monitor": key, "min_delta": 0.1, **settings})
    runner = fake_runner()
    hook.before_run(runner)
    hook.before_train(runner)
    for count, score in enumerate(scores, 1):
        hook.after_val_epoch(runner, {key: score})
        if runner.train_loop.stop_training:
            return count
    return None


def test_training_ends_when_the_metric_does_not_improve():
    # MMEngine's own case: the best is 92 at epoch 3, three epochs without an improvement end it after the sixth
    assert count_epochs([90, 91, 92, 88, 89, 90, 99], min_delta=1, patience=3) == 6


@pytest.mark.parametrize(
    ("scores", "settings", "expected"),
    [
        ([1.0] * 9, dict(), 6),  # the first is an improvement, then five are not
        ([1.0] * 9, dict(patience=3), 4),
        ([1, 1, 1.5, 1.5, 1.5, 2], dict(patience=3, min_delta=0.5), None),  # reaching best + min_delta is enough
        ([1.0, 1.05, 1.05], dict(patience=2), 3),
        ([1.0, 1.05, 1.1], dict(patience=2, min_delta=0.05), None),
        ([3.0, 2.0, 1.95, 1.95], dict(key="loss", patience=2), 4),
        ([3.0, 2.0, 1.9, 1.9], dict(key="loss", patience=2), None),
        ([3.0, 2.0, 3.0], dict(key="fid", rule="less", patience=1), 3),
        ([1.0, math.nan], dict(), 2),
        ([1.0, math.inf], dict(), 2),
        ([1.0, math.nan, math.nan, 2.0], dict(check_finite=False, patience=2), 3),  # NaN improves nothing
        ([0.5, 0.9, 0.91], dict(stopping_threshold=0.9), 3),  # strictly beyond
        ([0.5, 0.1], dict(key="loss", stopping_threshold=0.2), 2),
    ],
)
def test_when_training_ends(scores, settings, expected):
    assert count_epochs(scores, **settings) == expected


def test_a_restored_hook_continues_counting():
    scores = [1.0, 2.0, 1.0, 1.0, 1.0]
    assert count_epochs(scores, patience=3) == 5
    before = EarlyStoppingHook("acc", min_delta=0.1, patience=3)
    assert count_epochs(scores[:3], hook=before) is None
    assert before.state_dict() == {"best_score": 2.0, "wait_count": 1}
    after = EarlyStoppingHook("acc", min_delta=0.1, patience=3)
    after.load_state_dict(before.state_dict())
    assert count_epochs(scores[3:], hook=after) == 2


def test_a_missing_metric_is_a_warning_or_an_error(caplog):
    hook, runner = EarlyStoppingHook("acc", min_delta=0.1), fake_runner()
    hook.before_train(runner)
    hook.after_val_epoch(runner, {"ac": 1.0})
    assert "must be a metric of the validation, got 'acc'; did you mean 'ac'?" in caplog.text
    assert hook.state_dict() == {"best_score": None, "wait_count": 0}
    hook = EarlyStoppingHook("acc", min_delta=0.1, strict=True)
    hook.before_train(runner)
    with pytest.raises(RuntimeError, match="got 'acc'; expected one of: loss"):
        hook.after_val_epoch(runner, {"loss": 1.0})


def test_validations_outside_training_do_not_count():
    hook, runner = EarlyStoppingHook("acc", min_delta=0.1), fake_runner()
    hook.after_val_epoch(runner, {"acc": math.nan})
    hook.before_train(runner)
    hook.after_train(runner)
    hook.after_val_epoch(runner, {"acc": math.nan})
    assert not runner.train_loop.stop_training


def test_the_default_of_min_delta_logs_a_warning(caplog):
    hook = EarlyStoppingHook("acc")
    assert hook.min_delta == 0.1
    hook.before_train(fake_runner())
    assert "only improvements of 'acc' by at least 0.1 count" in caplog.text
    caplog.clear()
    EarlyStoppingHook("acc", min_delta=0.1).before_train(fake_runner())
    assert not caplog.text


def test_a_loop_that_cannot_be_stopped_is_refused():
    runner = types.SimpleNamespace(train_loop=object())
    with pytest.raises(AssertionError, match="must have the attribute `stop_training`.*got object without it"):
        EarlyStoppingHook("acc").before_run(runner)
    EarlyStoppingHook("acc").before_run(types.SimpleNamespace(train_loop=None))  # validation alone


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (dict(monitor="acc", rule="bigger"), ValueError, "rule` must be 'greater' or 'less' or None, got 'bigger'"),
        (dict(monitor="perplexity"), ValueError, "cannot infer from the name .*; pass rule="),
        (dict(monitor="acc", patience=0), ValueError, "patience` must be an integer of at least 1, got 0"),
        (dict(monitor="acc", patience=1.5), TypeError, "patience` must be an integer of at least 1, got 1.5"),
        (dict(), TypeError, "needs the argument 'monitor'"),
        (dict(monitor="acc", patient=1), TypeError, "did you mean 'patience'?"),
    ],
)
def test_invalid_arguments_are_refused_with_the_legal_values(arguments, error, message):
    with pytest.raises(error, match=message):
        HOOKS.build(dict(type="EarlyStoppingHook", **arguments))
