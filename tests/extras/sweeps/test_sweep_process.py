import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jengine.extras.report.run_table import read_table

CONFIG = pathlib.Path(__file__).parent / "swept_config.py"
ENDLESS = [
    "--config.train_cfg.max_iters=1000000", "--config.val_cfg=None", "--config.val_dataloader=None",
    "--config.val_evaluator=None", "--config.default_hooks.checkpoint.save_best=None",
]  # fmt: skip


def wait_for(condition, seconds=120):
    deadline = time.monotonic() + seconds
    while not (found := condition()) and time.monotonic() < deadline:
        time.sleep(0.2)
    return found


@pytest.fixture
def sweep(tmp_path):
    """Start a sweep of two endless runs, and wait until the first one trains."""
    command = [sys.executable, "-m", "jengine", "sweep", str(CONFIG), "--grid", "lr=0.1", "--seeds", "2"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(
        [*command, "--work-dir", str(tmp_path), *ENDLESS], stderr=subprocess.PIPE, text=True, env=environment
    )
    wait_for(lambda: list(tmp_path.glob("*/iter_*")))
    return process


def find_stopped(directory):
    """Return the row of the run that ended and was saved; None while there is none."""
    first = next((row for row in read_table([directory]).rows if row.status == "stopped by SIGTERM"), None)
    return first if first and (pathlib.Path(first.work_dir) / f"iter_{first.iter}").is_dir() else None


@pytest.mark.many_processes
def test_an_interrupt_saves_the_runs_and_says_how_to_continue(sweep, tmp_path):
    sweep.send_signal(signal.SIGINT)
    _, error = sweep.communicate(timeout=60)
    assert sweep.returncode == 130
    assert "jengine: interrupted: 0 of 2 runs are finished; to continue: jengine sweep " in error
    assert find_stopped(tmp_path)
    assert sorted(row.status for row in read_table([tmp_path]).rows) == ["stopped by SIGTERM", "waiting"]


@pytest.mark.many_processes
@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_the_runs_of_a_killed_sweep_save_and_end(sweep, tmp_path):
    sweep.kill()
    assert wait_for(lambda: find_stopped(tmp_path), 60)
    sweep.communicate()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process that its parent ended")
def test_a_run_is_told_once_that_its_sweep_of_several_threads_was_killed(tmp_path):
    script = pathlib.Path(__file__).with_name("parent_of_run.py")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    parent = subprocess.Popen([sys.executable, script, tmp_path], env=environment)
    assert wait_for((tmp_path / "ready").exists, 60)
    assert not (tmp_path / "count").exists()
    parent.kill()
    parent.wait()
    assert wait_for((tmp_path / "count").exists, 60)
    assert (tmp_path / "count").read_text() == "1"
