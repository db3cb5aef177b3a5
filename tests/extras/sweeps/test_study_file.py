"""Test the file of a search under locks, kills and damage."""

import fcntl
import os

import pytest

from jengine.config.errors import ConfigError
from jengine.extras.sweeps.search import Search
from jengine.extras.sweeps.study import StudyLock, open_journal

pytest.importorskip("optuna")


def make_search(directory):
    return Search(directory, "accuracy", "greater", {"lr": [0.1, 0.2]}, {})


@pytest.mark.parametrize(
    "plant",
    [
        lambda path: path.symlink_to(path.with_suffix("")),
        lambda path: path.symlink_to("/nowhere/optuna.log"),
        lambda path: path.touch(),
    ],
    ids=["link", "link to a directory that has moved", "file"],
)
def test_a_lock_that_a_killed_process_has_left_does_not_stop_a_search(tmp_path, plant):
    make_search(tmp_path).ask()
    plant(tmp_path / "optuna.log.lock")
    assert make_search(tmp_path).ask()[0] == 1


def test_an_incomplete_line_that_a_killed_process_has_left_is_removed(tmp_path, caplog):
    make_search(tmp_path).ask()
    with open(tmp_path / "optuna.log", "ab") as file:
        file.write(b'{"op_code":4,"worker')
    assert [make_search(tmp_path).ask()[0] for _ in range(2)] == [1, 2]
    assert "removed an incomplete line, which a killed process has left" in caplog.text


def test_a_process_that_holds_the_lock_is_waited_for_only_for_a_time(tmp_path):
    make_search(tmp_path)
    path = str(tmp_path / "optuna.log")
    with open(path, "ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(TimeoutError, match=f"another process has locked {path} for 0.1 s"):
            StudyLock(path, patience=0.1).acquire()
    lock = StudyLock(path, patience=0.1)
    assert lock.acquire()
    lock.release()


@pytest.mark.parametrize(
    "damage",
    [
        lambda path: path.write_text("no JSON\n\n"),
        lambda path: path.write_text("[" * 200_000 + "\n{}\n"),
        lambda path: path.write_text('{"op_code":99}\n'),
        lambda path: path.write_text("null\n"),
        lambda path: (path.unlink(), os.mkfifo(path)),
        lambda path: (path.unlink(), path.symlink_to("/dev/zero")),
        lambda path: (path.unlink(), path.mkdir()),
    ],
    ids=["no JSON", "deep", "unknown operation", "null", "pipe", "device", "directory"],
)
def test_a_damaged_file_of_a_search_is_named_in_one_sentence(tmp_path, damage):
    make_search(tmp_path)
    path = tmp_path / "optuna.log"
    damage(path)
    for function in (lambda: make_search(tmp_path), lambda: open_journal(str(path))):
        with pytest.raises(ConfigError, match=f"{path} must be the file of a search that can be read and written, got"):
            function()
