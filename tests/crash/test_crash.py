"""A run that is killed and started again ends as if nothing had happened. The long version is benchmarks/crash.py."""

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


def test_killed_runs_end_with_the_same_bits(kills, directory):
    assert kills.run(directory, kills=3, seed=0) >= 1


def test_terminated_runs_end_with_the_same_bits(kills, directory):
    assert kills.run(directory, kills=1, seed=1, signum=signal.SIGTERM) == 1
