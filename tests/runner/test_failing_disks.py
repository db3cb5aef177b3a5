"""Test what a run reports about a work dir that it cannot write, and what it still does then."""

import errno
import os
import pathlib
import shutil
import sys

import pytest

from jengine import checkpoint
from jengine.checkpoint.lock import is_locked
from jengine.checkpoint.lock_holder import LOCK
from jengine.config.errors import ConfigError
from jengine.config.storage import StorageError
from jengine.hooks import Hook
from jengine.logging import Visualizer

SAVE = dict(checkpoint=dict(type="CheckpointHook", interval=1), logger=dict(type="LoggerHook", interval=1))


def read_log(runner):
    return (pathlib.Path(runner.log_dir) / f"{runner.timestamp}.log").read_text()


class FullDisk(Visualizer):
    """Fail at the end, like files whose last lines do not fit on the disk."""

    def close(self):
        raise OSError(28, "No space left on device")


class Fail(Hook):
    """Raise an error at the end of training."""

    def after_train(self, runner):
        raise ZeroDivisionError("the reason")


def test_an_error_while_a_run_is_closed_does_not_hide_the_one_that_ended_it(make_runner, tmp_path):
    runner = make_runner(visualizer=FullDisk(save_dir=tmp_path), custom_hooks=[Fail()])
    with pytest.raises(ZeroDivisionError, match="the reason"):
        runner.train()
    assert "Closing the run failed as well: OSError: [Errno 28] No space left on device" in read_log(runner)
    assert not is_locked(tmp_path / "run")


def test_an_error_while_a_run_is_closed_releases_the_work_dir(make_runner, tmp_path):
    runner = make_runner(visualizer=FullDisk(save_dir=tmp_path))
    with pytest.raises(OSError, match="No space left on device"):
        runner.train()
    assert not is_locked(tmp_path / "run")
    assert not (tmp_path / "run" / LOCK).exists()


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("file", "`work_dir` must be writable, got .*file: "),
        ("file/run", "`work_dir` must be writable, got .*file/run: "),
        ("/proc/jengine", "`work_dir` must be writable, got /proc/jengine"),
    ],
)
def test_a_work_dir_that_cannot_be_written_is_refused_in_the_constructor(make_runner, tmp_path, path, message):
    (tmp_path / "file").write_text("mine")
    with pytest.raises(ConfigError, match=message):
        make_runner(work_dir=tmp_path / path)
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_text() == "mine"


class DeleteWorkDir(Hook):
    """Delete the work dir before an iteration, after the pending save."""

    def __init__(self, iteration):
        self.iteration = iteration

    def before_train_iter(self, runner, batch_idx, data_batch=None):
        if runner.iter == self.iteration:
            runner.checkpointer.wait()
            shutil.rmtree(runner.work_dir)


@pytest.mark.parametrize("iteration", [5, 11], ids=["before a save", "before the last save"])
def test_a_run_whose_work_dir_is_deleted_keeps_what_follows(make_runner, tmp_path, iteration):
    changes = dict(train_cfg=dict(max_epochs=3), default_hooks=SAVE, cfg=dict(note="x"))
    runner = make_runner(**changes, custom_hooks=[DeleteWorkDir(iteration)])
    runner.train()
    log = read_log(runner)
    assert f"was deleted during the run, before iteration {8 if iteration == 5 else 12}: it is created again" in log
    assert "Training is done." in log
    assert (tmp_path / "run" / "config.py").exists()
    assert checkpoint.find_latest(tmp_path / "run") == str(tmp_path / "run" / "epoch_3")
    assert (pathlib.Path(runner.log_dir) / "vis_data" / "scalars.json").exists()
    again = make_runner(**{**changes, "train_cfg": dict(max_epochs=4)}, resume=True)
    assert again.train().step == 16


class Unraisable(Hook):
    """Raise errors where Python can only report them, as TensorStore's threads do after a failed save."""

    def after_train(self, runner):
        for message in ("Event loop is closed", "another error"):
            sys.unraisablehook(type("Report", (), {"exc_value": RuntimeError(message)}))


def test_threads_of_a_failed_save_do_not_print_tracebacks(make_runner, monkeypatch):
    reports = []
    monkeypatch.setattr(sys, "unraisablehook", lambda report: reports.append(str(report.exc_value)))
    hook = sys.unraisablehook
    make_runner(custom_hooks=[Unraisable()]).train()
    assert reports == ["another error"]
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("resume", [True, "must"])
def test_a_run_whose_checkpoints_are_all_damaged_stops_and_moves_nothing(make_runner, tmp_path, resume):
    make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=2)).train()
    work_dir = tmp_path / "run"
    for path in work_dir.glob("epoch_*"):
        (path / "meta.json").write_text("{}")
    before = sorted(path.relative_to(work_dir) for path in work_dir.rglob("*"))
    with pytest.raises(checkpoint.CorruptCheckpointError, match=r"none can be read: epoch_2 \(meta.json must have"):
        make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=3), resume=resume)
    assert sorted(path.relative_to(work_dir) for path in work_dir.rglob("*")) == before


def test_a_disk_that_cannot_be_read_stops_a_resume_and_moves_nothing(make_runner, tmp_path, monkeypatch):
    make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=2)).train()
    open_file = os.open

    def fail(path, *args, **kwargs):
        if os.path.basename(path) == "manifest.json":
            raise OSError(errno.EIO, "Input/output error", str(path))
        return open_file(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", fail)
    with pytest.raises(StorageError, match=r"manifest\.json cannot be read: Input/output error"):
        make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=3), resume=True)
    monkeypatch.undo()
    runner = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=3), resume=True)
    runner.train()
    assert "Resumed from" in read_log(runner)
    assert not list((tmp_path / "run").glob("earlier_*"))


def test_the_hubs_paths_in_a_checkpoint_are_names(make_runner, tmp_path):
    runner = make_runner(default_hooks=SAVE, train_cfg=dict(max_epochs=2))
    runner.train()
    assert runner.message_hub.get_info("last_ckpt") == str(tmp_path / "run" / "epoch_2")
    meta = checkpoint.read_meta(tmp_path / "run" / "epoch_2")
    assert meta["message_hub"]["runtime_info"]["last_ckpt"] == "epoch_2"
