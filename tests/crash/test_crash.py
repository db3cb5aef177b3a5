"""Kill and restart runs: their results equal those of an uninterrupted run. benchmarks/crash.py repeats this more often.

`make test-all` kills 20 runs of several processes; `make test` one.
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


def test_killed_runs_are_bit_identical(kills, directory):
    assert kills.run(directory, kills=3, seed=0) >= 1


def test_terminated_runs_are_bit_identical(kills, directory):
    assert kills.run(directory, kills=1, seed=1, signum=signal.SIGTERM) == 1


@pytest.mark.many_processes
@pytest.mark.parametrize("seed", range(20))
def test_runs_of_which_one_process_is_killed_are_bit_identical(kills, directory, seed):
    kills.run_with_processes(directory, seed, count=2 + seed // 2 % 2, in_save=seed % 2 == 0)
