"""Test the command line as a person uses it: in a process of its own, on a terminal of 80 columns."""

import math
import os
import pathlib
import pty
import re
import signal
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[2]
DIGITS = ROOT / "configs" / "digits_cnn.py"


class Terminal:
    """Run `python -m jengine` on a pseudoterminal of 80 columns."""

    def __init__(self, *arguments, cwd):
        master, slave = pty.openpty()
        changes = {"COLUMNS": "80", "TERM": "xterm", "PYTHONPATH": str(ROOT)}
        changes |= {"XLA_FLAGS": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}  # long runs are faster with optimizations
        env = {**os.environ, **changes}
        command = [sys.executable, "-m", "jengine", *arguments]
        self.process = subprocess.Popen(command, stdin=slave, stdout=slave, stderr=slave, cwd=cwd, env=env)
        os.close(slave)
        self._master = master
        self.text = ""

    def read_until(self, pattern):
        """Read until the output matches a regular expression."""
        while not re.search(pattern, self.text):
            assert self._read(), self.text

    def finish(self):
        """Read the rest and return the exit code."""
        while self._read():
            pass
        os.close(self._master)
        return self.process.wait()

    def lines(self):
        """Return the lines as they stand at the end, without colors and earlier states of the progress bar."""
        lines = [line.rstrip("\r").split("\x1b[2K")[-1] for line in self.text.split("\n")]  # the bar erases its line
        return [re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", line).split("\r")[-1].rstrip() for line in lines]

    def _read(self):
        try:
            data = os.read(self._master, 65536)
        except OSError:  # the other end is closed
            return False
        self.text += data.decode()
        return bool(data)


@pytest.mark.parametrize("epochs", [4, pytest.param(20, marks=pytest.mark.many_processes)])
def test_the_demo_prints_at_most_40_lines_and_one_an_epoch_before_its_last_table(tmp_path, epochs):
    pytest.importorskip("sklearn")
    pytest.importorskip("tensorboard")
    terminal = Terminal("train", str(DIGITS), f"--config.train_cfg.max_epochs={epochs}", cwd=tmp_path)
    assert terminal.finish() == 0
    lines = terminal.lines()
    before = lines[: max(index for index, line in enumerate(lines) if line == "Time")]
    assert sum(max(1, math.ceil(len(line) / 80)) for line in before) <= 40 + epochs
    log = next(tmp_path.glob("work_dirs/*/*/*.log")).read_text()
    assert log.count(" - INFO - Epoch(train)") == epochs


LINE = """
import numpy as np
from jengine.data import ArrayDataset
from jengine.model import FunctionalModel

data = ArrayDataset(dict(x=np.ones((64, 1), np.float32)))
model = FunctionalModel(lambda: {"a": np.zeros((1,), np.float32)},
                        lambda params, batch: (params["a"] - batch["x"][:, 0]) ** 2,
                        lambda params, batch: batch["x"])


def get_config():
    return dict(
        model=model, train_dataloader=dict(batch_size=8, dataset=data), train_cfg=dict(max_epochs=100_000),
        optim_wrapper=dict(optimizer=dict(type="SGD", lr=0.1)),
        default_hooks=dict(logger=dict(type="LoggerHook", interval=5),
                           checkpoint=dict(type="CheckpointHook", interval=100_000)),
    )
"""


@pytest.mark.parametrize(("signum", "name", "code"), [(signal.SIGINT, "Ctrl-C", 130), (signal.SIGTERM, "SIGTERM", 143)])
def test_a_signal_is_one_line_with_the_way_to_continue_and_then_the_usual_end(tmp_path, signum, name, code):
    (tmp_path / "line.py").write_text(LINE)
    terminal = Terminal("train", "line.py", "--config.randomness.seed=3", "--work-dir", "w", cwd=tmp_path)
    terminal.read_until(r"loss: ")  # in the progress bar, or in a line
    terminal.process.send_signal(signum)
    assert terminal.finish() == code
    lines = terminal.lines()
    assert not any("Traceback" in line for line in lines)
    index = next(i for i, line in enumerate(lines) if "Interrupted" in line)
    match = re.search(
        rf"\d\d:\d\d:\d\d Interrupted by {name} after iteration (\d+); saved: (\w+). To continue: (.*)", lines[index]
    )
    assert int(match[1]) > 0
    assert (tmp_path / "w" / match[2]).is_dir()
    assert match[3] == "jengine train line.py --config.randomness.seed=3 --work-dir w --resume"
    assert lines[index + 1] == "Time"
    assert [line.split(":")[0] for line in lines[-4:] if line] == ["checkpoints", "log", "scalars"]
