import dataclasses
import math
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
from jengine.config.duration import parse_duration
from jengine.config.errors import ArgumentError, ConfigError
from jengine.hooks import CheckpointHook
from jengine.hooks.save_schedule import TimedSaves
from jengine.parallel.processes import SingleProcess
from tests.hooks.test_checkpoint_hook import FakeCheckpointer, kept_names
from tests.runner_fixture import QuickRunner


def train(path, epochs=3, epoch_length=4, settings=(), **hook):
    runner = QuickRunner(path, [CheckpointHook(**hook)], epochs=epochs, epoch_length=epoch_length, **dict(settings))
    runner.train()
    return runner


def saved(runner):
    return sorted(int(path.rpartition("_")[2]) for path in checkpoint.list_checkpoints(runner.work_dir))


# --- By time. ---


@pytest.mark.parametrize(
    ("text", "seconds"), [("90s", 90), ("15m", 900), ("1.5h", 5400), ("1d", 86400), ("23:50:00", 85800)]
)
def test_durations_are_read(text, seconds):
    assert parse_duration(text) == seconds


@pytest.mark.parametrize("interval", ["15", "15 min", "0s", "1:60:00", ""])
def test_other_durations_are_refused(interval):
    with pytest.raises(ArgumentError, match="`CheckpointHook.interval` must be .* like '90s', '15m', '2h' or '23:50"):
        CheckpointHook(interval=interval)


@pytest.mark.parametrize("by_epoch", [True, False])
def test_an_interval_in_time_saves_at_any_iteration_and_the_end(tmp_path, by_epoch):
    often = train(tmp_path / "often", interval="0.000001s", by_epoch=by_epoch, max_keep_ckpts=5)
    assert saved(often) == [8, 9, 10, 11, 12]  # each iteration takes longer
    rarely = train(tmp_path / "rarely", interval="1h", by_epoch=by_epoch)
    assert [path.rpartition("/")[2] for path in checkpoint.list_checkpoints(rarely.work_dir)] == ["iter_12"]


class Process:
    """One of two processes, of which process 0 tells the other its decisions; they run one after the other here."""

    count = 2

    def __init__(self, index, told):
        self.index, self.told = index, told

    def broadcast(self, name, value):
        if self.index == 0:
            self.told.append(value)
            return value
        return self.told.pop(0)


def run_timed(saves, runner, clock, step_times):
    """Return the steps that are saved, and those at which processes exchange the time."""
    due, exchanges = [], []
    saves.start(runner, 0)
    for step, seconds in enumerate(step_times):
        clock.now += seconds
        if saves.next_step(runner, step) <= step:
            exchanges.append(step)
            if saves.is_due(runner, step, []):
                due.append(step)
                saves.start(runner, step + 1)
    return due, exchanges


def test_one_process_saves_after_the_first_iteration_that_ends_after_the_interval():
    clock, runner = types.SimpleNamespace(now=0.0), types.SimpleNamespace(processes=SingleProcess())
    saves = TimedSaves(900.0, lambda: clock.now)
    due, asked = run_timed(saves, runner, clock, [100.0] * 20)
    assert due == asked == [8, 17]  # 900 s after the start, and after the save
    assert saves.next_step(runner, 20) == math.inf  # chunks go on until then


def test_several_processes_save_at_the_steps_of_process_0_after_few_exchanges():
    told, results = [], []
    step_times = [60.0] + [0.1] * 12_000 + [0.3] * 4_000  # the first compiles, later ones are slower
    for index, speed in ((0, 1.0), (1, 0.0)):  # the clock of process 1 stands still
        clock, runner = types.SimpleNamespace(now=0.0), types.SimpleNamespace(processes=Process(index, told))
        saves = TimedSaves(900.0, lambda clock=clock, speed=speed: speed * clock.now)
        results.append(run_timed(saves, runner, clock, step_times))
    (due, exchanges), other = results
    assert other == (due, exchanges)
    # 900 s are over after 60 s and 8,400 steps of 0.1 s; then after 3,600 of 0.1 s and 1,800 of 0.3 s
    assert due == [pytest.approx(8400, abs=2), pytest.approx(8400 + 3600 + 1800, abs=100)]  # 30 s late
    assert len(exchanges) < 60


# --- Policies of Orbax. ---


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
    ("settings", "message"),
    [
        (dict(interval=2, save_policy=FixedIntervalPolicy(3)), "interval must be left out with FixedIntervalPolicy, got 2"),
        (dict(interval="15m", save_policy=FixedIntervalPolicy(3)), "interval must be left out with FixedIntervalPolicy, got '15m'"),
        (dict(interval="15m", save_begin=3), "save_begin must be left out with '15m', got 3"),
        (dict(interval="15m", keep_period=3, max_keep_ckpts=1), "keep_period must be left out with '15m'"),
        (dict(interval=1, max_keep_ckpts=3, preservation_policy=LatestN(3)), "max_keep_ckpts must be left out with LatestN"),
        (dict(save_policy=LatestN(3)), "save_policy` must be a SavePolicy or None, got LatestN"),
        (dict(preservation_policy=FixedIntervalPolicy(3)), "preservation_policy` must be a KeepPolicy or None"),
    ],
)
def test_settings_that_would_have_no_effect_are_refused(settings, message):
    with pytest.raises((ConfigError, TypeError), match=message):
        CheckpointHook(**settings)


def test_a_policy_that_asks_process_0_after_each_iteration_is_refused_for_several():
    hook = CheckpointHook(save_policy=AnySavePolicy([ContinuousCheckpointingPolicy()]))
    runner = types.SimpleNamespace(processes=types.SimpleNamespace(count=2), work_dir="", iter=0)
    with pytest.raises(ConfigError, match="must not be ContinuousCheckpointingPolicy with several processes"):
        hook.before_train(runner)
