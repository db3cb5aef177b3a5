"""Test the progress bar, and the log lines of training that a terminal with the bar shows."""

import io
import types

import pytest
from rich.console import Console

import jengine.logging
from jengine.hooks import ProgressHook
from jengine.logging import build_logger, console


@pytest.fixture
def run(monkeypatch, tmp_path):
    """Return a run on a terminal of 80 columns whose clock the test sets, with its output."""
    out = io.StringIO()
    terminal = Console(file=out, force_terminal=True, width=80, highlight=False)
    monkeypatch.setattr(console, "terminal", terminal)
    monkeypatch.setattr(jengine.logging, "terminal", terminal)
    monkeypatch.setattr(console, "_loggers", {})
    logger = build_logger("progress", str(tmp_path / "run.log"))
    return types.SimpleNamespace(
        out=out, logger=logger, runner=types.SimpleNamespace(max_iters=100, iter=0, logger=logger), seconds=0.0
    )


def log_line(run, seconds, loss):
    """Log a line of training at a time."""
    run.seconds = seconds
    run.logger.info(f"Epoch(train) loss {loss}", extra={"periodic": {"train/loss": loss}})


def test_the_terminal_shows_one_training_line_a_minute_and_the_log_file_all(run, tmp_path):
    hook = ProgressHook(clock=lambda: run.seconds)
    hook.before_train(run.runner)
    for seconds in (1, 59, 61, 100, 122):
        log_line(run, seconds, float(seconds))
    run.logger.info("Epoch(val)")
    hook.after_train(run.runner)
    log_line(run, 123, 123.0)  # after the bar every line is shown
    shown = [float(part.split("\n")[0]) for part in run.out.getvalue().split("Epoch(train) loss ")[1:]]
    assert shown == [61, 122, 123]
    assert "Epoch(val)" in run.out.getvalue()
    assert (tmp_path / "run.log").read_text().count("Epoch(train)") == 6


def test_the_bar_has_the_loss_of_the_newest_line(run):
    hook = ProgressHook(clock=lambda: run.seconds)
    hook.before_train(run.runner)
    log_line(run, 1, 0.25)
    hook.after_train(run.runner)
    bar = run.out.getvalue()
    assert "loss: 0.2500" in bar
    assert "0/100" in bar


def test_a_lost_terminal_does_not_fail_the_end_of_a_run(run, tmp_path, monkeypatch):
    hook = ProgressHook(clock=lambda: run.seconds)
    hook.before_train(run.runner)

    def fail(text):
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(run.out, "write", fail)
    hook.on_failure(run.runner)
    run.logger.info("Interrupted by SIGHUP")
    assert "Interrupted by SIGHUP" in (tmp_path / "run.log").read_text()
