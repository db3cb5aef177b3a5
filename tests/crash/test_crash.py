"""Kill and restart runs: their results equal those of an uninterrupted run. benchmarks/crash.py repeats this more often.

`make test` kills one run on a disk and one in a bucket, and terminates one; `make test-all` kills many, also runs of several processes.
"""

import importlib.util
import pathlib
import signal

import pytest


@pytest.fixture(scope="module")
def kills():
    spec = importlib.util.spec_from_file_location("kills", pathlib.Path(__file__).parent / "kills.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return tmp_path_factory.mktemp("crash")


@pytest.mark.parametrize(
    ("count", "seed", "iterations"),
    [(1, 0, 12), pytest.param(2, 2, 40, marks=pytest.mark.many_processes)],
    ids=["once", "twice"],
)
def test_killed_runs_are_bit_identical(kills, directory, count, seed, iterations):
    assert kills.run(directory, kills=count, seed=seed, iterations=iterations) >= 1


def test_terminated_runs_are_bit_identical(kills, directory):
    assert kills.run(directory, kills=1, seed=1, signum=signal.SIGTERM, iterations=12) == 1


@pytest.mark.parametrize(
    ("count", "seed"), [(1, 0), pytest.param(2, 20, marks=pytest.mark.many_processes)], ids=["once", "twice"]
)
def test_runs_that_are_killed_while_they_save_to_a_failing_bucket_are_bit_identical(
    directory, google_storage, count, seed
):
    from tests.crash import bucket_kills

    interrupted, faults = bucket_kills.run(directory, google_storage, count_kills=count, seed=seed, fault_rate=0.02)
    assert interrupted >= 1
    assert faults >= 1


@pytest.mark.many_processes
@pytest.mark.parametrize(
    ("seed", "fault_rate"), [*((seed, 0.0) for seed in range(5)), *((5 + i, 0.03) for i in range(5))]
)
def test_forty_kills_of_runs_that_save_to_a_bucket(directory, google_storage, seed, fault_rate):
    from tests.crash import bucket_kills

    interrupted, _ = bucket_kills.run(directory, google_storage, count_kills=4, seed=seed, fault_rate=fault_rate)
    assert interrupted >= 1


@pytest.mark.many_processes
def test_two_processes_that_save_to_a_failing_bucket_and_are_killed_are_bit_identical(directory, google_storage):
    from tests.crash import bucket_kills

    interrupted, _ = bucket_kills.run(directory, google_storage, count_kills=2, seed=1, fault_rate=0.02, count=2)
    assert interrupted >= 1


@pytest.mark.many_processes
@pytest.mark.parametrize("seed", range(20))
def test_runs_of_which_one_process_is_killed_are_bit_identical(kills, directory, seed):
    kills.run_with_processes(directory, seed, count=2 + seed // 2 % 2, in_save=seed % 2 == 0)
