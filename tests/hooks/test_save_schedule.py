import math
import types

import pytest

from jengine import checkpoint
from jengine.config.duration import parse_duration
from jengine.hooks import CheckpointHook
from jengine.hooks.save_schedule import TimedSaves
from jengine.parallel.processes import SingleProcess
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
            if saves.is_due(runner, step):
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
