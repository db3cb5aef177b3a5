"""Kill and restart runs: their results equal those of an uninterrupted run. benchmarks/crash.py repeats this more often."""

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
