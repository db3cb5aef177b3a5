import errno
import fcntl
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import pytest

from jengine.checkpoint import WorkDirLock, WorkDirLockedError
from jengine.checkpoint.lock import is_locked
from jengine.checkpoint.lock_holder import LOCK
from jengine.config.errors import ConfigError

HOLDER = """
import os, sys
from jengine.checkpoint.lock import WorkDirLock
WorkDirLock(sys.argv[1]).acquire()
if "fork" in sys.argv and os.fork() == 0:
    os.close(1)  # a worker that outlives the run
    sys.stdin.read()
    os._exit(0)
print("held", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def start_holder(tmp_path):
    """Start a process that holds the lock of `tmp_path` until its stdin is closed."""
    processes = []

    def start(*arguments):
        process = subprocess.Popen(
            [sys.executable, "-c", HOLDER, str(tmp_path), *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[2],
        )  # fmt: skip
        processes.append(process)
        assert process.stdout.readline() == "held\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.stdin.close()
        process.wait()
        process.stdout.close()


def test_a_second_process_is_refused_with_the_pid_and_host_of_the_first(tmp_path, start_holder):
    process = start_holder()
    assert is_locked(tmp_path)
    with pytest.raises(
        WorkDirLockedError, match=f"process {process.pid} on host .*another work_dir"
    ) as error:
        WorkDirLock(tmp_path).acquire()
    assert (error.value.pid, error.value.host) == (process.pid, os.uname().nodename)
    assert isinstance(error.value, ConfigError)
    process.stdin.close()
    assert process.wait(timeout=30) == 0
    assert os.listdir(tmp_path) == []  # released at exit
    WorkDirLock(tmp_path).acquire()


def test_code_that_reads_or_copies_the_lock_file_does_not_release_it(run_python, tmp_path):
    lock = WorkDirLock(tmp_path / "run")
    lock.acquire()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    (tmp_path / "run" / LOCK).read_text()
    program = f"from jengine.checkpoint.lock import WorkDirLock; WorkDirLock({str(tmp_path / 'run')!r}).acquire()"
    other = run_python(program)
    assert (
        f"another run is training in {tmp_path / 'run'}: process {os.getpid()} on host"
        in other.stderr
    )
    lock.release()
    assert not is_locked(tmp_path / "run")


def test_a_killed_run_blocks_nothing_and_is_mentioned_in_a_warning(tmp_path, start_holder, caplog):
    process = start_holder("fork")
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert not is_locked(tmp_path)
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    assert f"the previous run (process {process.pid} on host" in caplog.text
    assert "ended without releasing its lock; taking over" in caplog.text
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()


def test_release_leaves_nothing_behind_and_can_be_repeated(tmp_path):
    work_dir = tmp_path / "new" / "run"
    lock = WorkDirLock(work_dir)
    lock.release()
    lock.acquire()
    assert is_locked(work_dir)
    lock.release()
    lock.release()
    assert os.listdir(work_dir) == []
    assert not is_locked(work_dir)
    lock.acquire()
    lock.release()


def test_a_truncated_lock_file_of_a_killed_run_is_taken_over(tmp_path, caplog):
    (tmp_path / LOCK).write_text('{"pid": 1')
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()
    assert caplog.text == ""


def test_a_file_removed_between_opening_and_locking_is_not_mistaken_for_the_lock(
    tmp_path, monkeypatch
):
    flock, removed = fcntl.flock, []

    def remove_first(file, how):
        if not removed:
            removed.append(os.unlink(tmp_path / LOCK))
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", remove_first)
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    assert json.loads((tmp_path / LOCK).read_text())["pid"] == os.getpid()
    lock.release()


def test_without_file_locks_the_run_continues_with_a_warning(tmp_path, monkeypatch, caplog):
    def refuse(file, how):
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(fcntl, "flock", refuse)
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    assert "cannot be locked on this file system (No locks available)" in caplog.text
    assert os.listdir(tmp_path) == []
    lock.release()


def test_other_processes_of_the_same_run_hold_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("jax.process_index", lambda: 1)
    lock = WorkDirLock(tmp_path)
    lock.acquire()
    assert os.listdir(tmp_path) == []
    lock.release()
