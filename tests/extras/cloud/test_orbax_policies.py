import dataclasses
import types

import pytest
from orbax.checkpoint.checkpoint_managers import (
    AnyPreservationPolicy,
    AnySavePolicy,
    BestN,
    ContinuousCheckpointingPolicy,
    EveryNSteps,
    FixedIntervalPolicy,
    LatestN,
    PreemptionCheckpointingPolicy,
    SpecificStepsPolicy,
)

from jengine import checkpoint
from jengine.config.errors import ConfigError
from jengine.hooks import CheckpointHook
from jengine.parallel.processes import SingleProcess
from tests.hooks.test_checkpoint_hook import FakeCheckpointer, kept_names
from tests.hooks.test_save_schedule import saved, train
from tests.refusals import check_refusal
from tests.runner_fixture import QuickRunner


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (FixedIntervalPolicy(5), [5, 10]),
        (SpecificStepsPolicy([1, 3, 11]), [1, 3, 11]),
        (AnySavePolicy([FixedIntervalPolicy(6), SpecificStepsPolicy([2])]), [2, 6, 12]),
        (PreemptionCheckpointingPolicy(), []),
        (ContinuousCheckpointingPolicy(minimum_interval_secs=3600), [1]),  # the first at once
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_save_policy_decides_after_each_iteration(tmp_path, policy, expected):
    assert saved(train(tmp_path, save_policy=policy, save_last=False)) == expected


def test_a_policy_that_counts_steps_leaves_the_chunks_between_them(tmp_path):
    hook = CheckpointHook(save_policy=FixedIntervalPolicy(6), save_last=False)
    runner = types.SimpleNamespace(
        train_loop=types.SimpleNamespace(steps_per_call=4), processes=SingleProcess(),
        checkpointer=types.SimpleNamespace(is_saving=False), max_iters=100,
    )  # fmt: skip
    assert [hook.next_step(runner, step) for step in (0, 3, 5, 6)] == [4, 5, 5, 10]  # as far as a chunk reaches
    continuous = CheckpointHook(save_policy=ContinuousCheckpointingPolicy(), save_last=False)
    assert continuous.next_step(runner, 0) == 0


def test_a_preservation_policy_decides_which_checkpoints_stay(tmp_path):
    policy = AnyPreservationPolicy([LatestN(2), EveryNSteps(8)])
    runner = train(tmp_path, epochs=5, interval=1, preservation_policy=policy)
    assert saved(runner) == [2, 4, 5]  # epochs of 4 iterations: 8 and 16 are multiples of 8
    meta = checkpoint.read_meta(tmp_path)
    assert meta["hooks"]["CheckpointHook"]["reasons"]["epoch_5"] == "kept by AnyPreservationPolicy"


def test_best_n_sees_the_metrics_of_the_validation_after_each_checkpoint(tmp_path):
    scores = [{"acc": score} for score in (0.5, 0.9, 0.1, 0.7, 0.3)]
    policy = BestN(get_metric_fn=lambda metrics: metrics["acc"], n=2, keep_checkpoints_without_metrics=False)
    runner = train(tmp_path, epochs=5, interval=1, preservation_policy=policy, settings=dict(validations=scores))
    assert saved(runner) == [2, 4, 5]  # the newest in any case


def test_a_resumed_run_knows_the_steps_times_and_metrics(tmp_path):
    scores = [{"acc": score} for score in (0.9, 0.1, 0.2, 0.3)]
    policy = BestN(get_metric_fn=lambda metrics: metrics["acc"], n=1, keep_checkpoints_without_metrics=False)
    hook = CheckpointHook(interval=1, preservation_policy=policy)
    first = QuickRunner(tmp_path, [hook], epochs=2, validations=scores)
    first.train()
    resumed = CheckpointHook(interval=1, preservation_policy=policy)
    resumed.load_state_dict(hook.state_dict())
    assert resumed.state_dict() == hook.state_dict()
    second = QuickRunner(tmp_path, [resumed], epochs=4, done=2, validations=scores[2:])
    fake = FakeCheckpointer([str(tmp_path / "epoch_1"), str(tmp_path / "epoch_2")])
    second.run = dataclasses.replace(second.run, checkpointer=fake)
    second.train()
    assert kept_names(second) == ["epoch_1", "epoch_4"]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (dict(interval=2, save_policy=FixedIntervalPolicy(3)), ["FixedIntervalPolicy", "got 2"]),
        (dict(interval="15m", save_policy=FixedIntervalPolicy(3)), ["FixedIntervalPolicy", "got '15m'"]),
        (dict(interval="15m", save_begin=3), ["save_begin", "'15m'", "got 3"]),
        (dict(interval="15m", keep_period=3, max_keep_ckpts=1), ["keep_period", "'15m'"]),
        (dict(interval=1, max_keep_ckpts=3, preservation_policy=LatestN(3)), ["max_keep_ckpts", "LatestN"]),
        (dict(save_policy=LatestN(3)), ["save_policy`", "SavePolicy", "None", "got LatestN"]),
        (dict(preservation_policy=FixedIntervalPolicy(3)), ["preservation_policy`", "KeepPolicy", "None"]),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings, words):
    check_refusal(lambda: CheckpointHook(**settings), (ConfigError, TypeError), *words)
