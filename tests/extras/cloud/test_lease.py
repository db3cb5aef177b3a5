import concurrent.futures
import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

from jengine.checkpoint.lock import is_locked, make_lock
from jengine.checkpoint.lock_holder import LOCK, WorkDirLockedError
from jengine.extras.cloud.lease import Lease
from jengine.extras.cloud.url_files import get_filesystem

HOLDER = """
import sys
from jengine.extras.cloud.lease import Lease
lease = Lease(sys.argv[1], float(sys.argv[2]))
lease.acquire()
for line in sys.stdin:
    try:
        lease.check(before_write=True)
        print("holds the lease", flush=True)
    except Exception as error:
        print(error, flush=True)
"""
SECONDS = 0.6  # of a lease


@pytest.fixture(params=["gs_bucket", "s3_bucket"])
def url(request):
    return f"{request.getfixturevalue(request.param)}/run"


@pytest.fixture
def leases(url):
    """Return a function that makes leases on `url`, released at the end."""
    made = []

    def make(seconds=SECONDS):
        made.append(Lease(url, seconds))
        return made[-1]

    yield make
    for lease in made:
        lease.release()


def list_objects(url):
    return get_filesystem(url).find(url)


def test_a_second_run_is_refused_with_the_pid_and_host_of_the_first(url, leases):
    lease = leases()
    lease.acquire()
    lease.acquire()
    assert is_locked(url)
    start = time.monotonic()
    with pytest.raises(
        WorkDirLockedError, match=f"in {url}: process {os.getpid()} on host .*another work_dir"
    ) as error:
        leases().acquire()
    assert time.monotonic() - start < SECONDS  # it has seen a renewal
    assert (error.value.pid, error.value.host) == (os.getpid(), os.uname().nodename)
    lease.check(before_write=True)
    lease.release()
    lease.release()
    assert list_objects(url) == []
    assert not is_locked(url)
    leases().acquire()


def test_a_paused_run_stops_only_if_another_has_taken_its_expired_lease(url, leases, caplog):
    process = subprocess.Popen(
        [sys.executable, "-c", HOLDER, url, str(SECONDS)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=pathlib.Path(__file__).parents[3],
    )  # fmt: skip

    def check():
        process.stdin.write("\n")
        process.stdin.flush()
        return process.stdout.readline()

    with process:
        assert check() == "holds the lease\n"
        process.send_signal(signal.SIGSTOP)
        time.sleep(2 * SECONDS)
        process.send_signal(signal.SIGCONT)
        assert check() == "holds the lease\n"
        get_filesystem(url).rm(f"{url}/{LOCK}")  # somebody tidies up
        time.sleep(SECONDS)
        assert check() == "holds the lease\n"
        process.send_signal(signal.SIGSTOP)
        lease = leases()
        lease.acquire()
        assert f"the previous run (process {process.pid} on host" in caplog.text
        assert "ended without releasing its lock; taking over" in caplog.text
        process.send_signal(signal.SIGCONT)
        message = check()
        assert f"another run is training in {url}: process {os.getpid()} on host {os.uname().nodename}" in message
        assert "paused or cut off for so long that it lost its lock, and stops" in message
        process.stdin.close()
        assert process.wait(timeout=30) == 0
    lease.check(before_write=True)  # the end of the other process did not release it
    assert is_locked(url)


@pytest.mark.parametrize("offset", [-86400, 86400])
def test_a_lease_is_watched_for_its_duration_whatever_the_time_in_it(url, leases, offset):
    holder = dict(pid=1, host="node-1", since="?", seconds=SECONDS, renewed=time.time() + offset)
    get_filesystem(url).pipe(f"{url}/{LOCK}", json.dumps(holder).encode())
    start = time.monotonic()
    leases().acquire()
    assert SECONDS <= time.monotonic() - start < 10 * SECONDS


@pytest.mark.parametrize("seconds", ["1e308", '{"$float": "Infinity"}', "NaN", "-5", '"a"', "1e9"])
def test_a_lease_that_names_no_possible_duration_is_watched_for_that_of_the_new_run(url, leases, seconds):
    get_filesystem(url).pipe_file(f"{url}/{LOCK}", f'{{"seconds": {seconds}}}'.encode())
    started = time.monotonic()
    leases(0.5).acquire()
    assert 0.5 <= time.monotonic() - started < 5


def test_a_clock_that_is_fast_takes_no_lease_from_a_run_that_renews_it(url, leases, monkeypatch):
    first = leases()
    first.acquire()
    clock = time.time
    monkeypatch.setattr(time, "time", lambda: clock() + 3600)
    with pytest.raises(WorkDirLockedError, match=f"process {os.getpid()} on host"):
        leases().acquire()
    first.check(before_write=True)
    monkeypatch.undo()
    assert is_locked(url)


def test_of_runs_that_take_over_together_one_gets_the_lease(url, leases):
    get_filesystem(url).pipe(f"{url}/{LOCK}", b'{"pid": 1')  # incomplete
    with concurrent.futures.ThreadPoolExecutor() as threads:
        futures = [threads.submit(leases().acquire) for _ in range(3)]
        results = [future.exception() for future in futures]
    assert sorted(type(result).__name__ for result in results) == ["NoneType", *["WorkDirLockedError"] * 2]


def test_an_answer_that_is_lost_takes_the_lease_from_nobody(gs_bucket, google_storage, monkeypatch):
    monkeypatch.setattr("random.random", lambda: -0.9)  # gcsfs pauses for a second before it tries again
    lease = Lease(f"{gs_bucket}/run", 3600)
    faults = iter(["lost"])
    google_storage.choose_fault = lambda method, path: next(faults, None) if method == "POST" else None
    lease.acquire()
    lease.check(before_write=True)
    lease.release()
    assert google_storage.list_names(gs_bucket) == []


def test_a_store_that_fails_for_some_time_costs_a_warning(gs_bucket, google_storage, monkeypatch, caplog):
    async def no_pause(seconds):
        pass

    monkeypatch.setattr("asyncio.sleep", no_pause)
    lease = Lease(f"{gs_bucket}/run", SECONDS)
    lease.acquire()
    google_storage.choose_fault = lambda method, path: "error"
    time.sleep(SECONDS)
    lease.check()
    with pytest.raises(Exception, match="503"):
        lease.check(before_write=True)  # it cannot know whether the lease is still its own
    google_storage.choose_fault = lambda method, path: None
    lease.check(before_write=True)
    assert caplog.text.count("could not be renewed") == 1
    lease.release()
    assert google_storage.list_names(gs_bucket) == []


def test_a_directory_has_the_lock_of_its_storage(tmp_path, url):
    assert type(make_lock(tmp_path)).__name__ == "WorkDirLock"
    assert isinstance(make_lock(url), Lease)
