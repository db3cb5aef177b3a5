import pathlib
import re
import threading

import numpy as np
import pytest

from jengine.cli.main import main
from jengine.extras.diagnose import progress_watch
from jengine.extras.diagnose.stacks import find_own_lines
from jengine.extras.diagnose.stalls import IterationTimes
from jengine.extras.report.page_data import build_page_data
from jengine.extras.report.run_files import read_runs
from jengine.hooks import Hook

IN_ORDER = dict(type="DefaultSampler", shuffle=False)


class Samples:
    """Dataset that calls `act` before the sample at an index, once."""

    def __init__(self, index, act):
        self.index, self.act = index, act

    def __len__(self):
        return 64

    def __getitem__(self, index):
        if index == self.index and self.act is not None:
            act, self.act = self.act, None
            act()
        return dict(x=np.ones(2, np.float32), y=np.float32(1))


class Act(Hook):
    """Hook that calls `act` after the iteration with an index."""

    def __init__(self, iteration, act):
        self.iteration, self.act = iteration, act

    def after_train_iter(self, runner, batch_idx, data_batch=None, outputs=None):
        if runner.iter == self.iteration:
            self.act()


def read_log(runner):
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


def train_on(make_runner, **changes):
    runner = make_runner(train_cfg=dict(by_epoch=False, max_iters=8), **changes)
    runner.train()
    return runner


@pytest.mark.parametrize("num_threads", [0, 1])
def test_a_dataset_that_hangs_is_named_by_its_line_once(make_runner, monkeypatch, num_threads):
    monkeypatch.setattr(progress_watch, "LIMIT", 1.0)

    def hang():
        threading.Event().wait(4)  # the line that hangs

    loader = dict(batch_size=4, dataset=Samples(20, hang), sampler=IN_ORDER, num_threads=num_threads)
    log = read_log(train_on(make_runner, train_dataloader=loader))
    (line,) = [line for line in log.splitlines() if "Training has made no progress" in line]
    assert f"{__file__}:" in line
    assert "in hang: threading.Event().wait(4)  # the line that hangs" in line
    assert "in `input`" in line
    assert "it waits for train_dataloader (DataLoader(Samples)), batch" in line
    assert "Thread MainThread" in log


def test_a_training_without_a_hang_logs_no_stacks(make_runner, monkeypatch):
    monkeypatch.setattr(progress_watch, "LIMIT", 60.0)
    assert "no progress" not in read_log(train_on(make_runner))


def test_the_command_prints_the_stacks_of_a_run_whose_main_thread_hangs(make_runner, capsys):
    codes = []

    def ask():
        thread = threading.Thread(target=lambda: codes.append(main(["stacks", runner.work_dir])))
        thread.start()
        thread.join(60)  # the main thread waits here

    runner = make_runner(
        train_cfg=dict(by_epoch=False, max_iters=4), custom_hooks=[Act(2, ask)]
    )
    runner.train()
    assert codes == [0]
    out = capsys.readouterr().out
    assert "iteration 2 of 4, in `hooks` for" in out
    assert f"at {__file__}:" in out
    assert "in ask: thread.join(60)  # the main thread waits here" in out
    assert "the batch has x f32[4,2]" in out
    assert "Thread MainThread" in out
    assert not list(pathlib.Path(runner.work_dir).glob("stacks*"))


def test_the_command_names_a_directory_without_a_training(tmp_path, capsys):
    assert main(["stacks", str(tmp_path), "--timeout", "0.1"]) == 2
    assert "WORK_DIR must have a run that trains, got no answer" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_the_slowest_iteration_is_named_with_its_cause_and_line(make_runner):
    def rest():
        threading.Event().wait(2)  # slow

    runner = train_on(make_runner, custom_hooks=[Act(5, rest)])
    log = read_log(runner)
    (line,) = [line for line in log.splitlines() if line.startswith("slowest iterations: ")]
    assert re.search(rf" 5 \(\d+\.\d s, host: {re.escape(__file__)}:", line)
    assert " 8 (" not in line  # the program of the validation that follows compiles
    assert "in rest: threading.Event().wait(2)  # slow)" in line
    (run,) = build_page_data(read_runs([runner.work_dir]))["runs"]
    slow = next(each for each in run["slowest"] if each["iteration"] == 5)
    assert slow["cause"] == "host"
    assert slow["seconds"] > 1.8
    assert slow["place"].endswith("# slow")
    assert {series["name"] for series in run["series"]} >= {"share/host", "share/device"}


def test_time_that_turns_out_to_be_that_of_compiling_counts_once():
    times = IterationTimes()
    times.add(0, {})
    times.add(0, {"step": 10.0})
    times.add(0, {"step": -10.0, "compile": 10.5})
    times.add(1, {"input": 0.1})
    assert [str(slow) for slow in times.slowest] == ["0 (10.6 s, compile)"]
    assert [dict(spent) for _, spent in times.intervals] == [{"device": 0.0, "compile": 10.5, "input": 0.1}]


def test_an_iteration_that_waits_for_data_has_the_cause_input(make_runner):
    def rest():
        threading.Event().wait(2)

    loader = dict(batch_size=4, dataset=Samples(20, rest), sampler=IN_ORDER, device_prefetch=0)
    log = read_log(train_on(make_runner, train_dataloader=loader))
    (line,) = [line for line in log.splitlines() if line.startswith("slowest iterations: ")]
    assert re.search(r" 5 \(\d+\.\d s, input: ", line)


def test_only_lines_that_the_engine_has_called_are_the_users(tmp_path):
    engine = pathlib.Path(progress_watch.__file__)
    script = tmp_path / "train.py"
    script.write_text("import jengine\nlong_call()\n")
    frames = [f'  File "{script}", line 2 in load', f'  File "{engine}", line 1 in run', f'  File "{script}", line 1 in <module>']
    assert find_own_lines("\n".join(["Thread MainThread (most recent call first):", *frames])) == [f"{script}:2 in load: long_call()"]
    assert find_own_lines("\n".join(["Thread MainThread (most recent call first):", frames[2]])) == []
