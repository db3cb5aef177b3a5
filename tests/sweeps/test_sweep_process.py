import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jengine.cli.report.run_table import read_table

CONFIG = pathlib.Path(__file__).parent / "swept_config.py"


@pytest.mark.many_processes
def test_an_interrupt_saves_the_runs_and_says_how_to_continue(tmp_path):
    options = [
        "--seeds",
        "2",
        "--work-dir",
        str(tmp_path),
        "--config.train_cfg.max_iters=1000000",
        "--config.val_cfg=None",
    ]
    options += [
        "--config.val_dataloader=None",
        "--config.val_evaluator=None",
        "--config.default_hooks.checkpoint.save_best=None",
    ]
    command = [sys.executable, "-m", "jengine", "sweep", str(CONFIG), "--grid", "lr=0.1", *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment)
    deadline = time.monotonic() + 120
    while not list(tmp_path.glob("*/iter_*")) and time.monotonic() < deadline:  # until it trains
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "jengine: interrupted: 0 of 2 runs are finished; to continue: jengine sweep " in error
    first, *others = sorted(read_table([tmp_path]).rows, key=lambda row: row.status)
    assert (first.status, {row.status for row in others}) == ("stopped by SystemExit", {"waiting"})
    assert (pathlib.Path(first.work_dir) / f"iter_{first.iter}").is_dir()
