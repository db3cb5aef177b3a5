"""Test the rendezvous, with threads as processes."""

import concurrent.futures
import socket

import pytest

from jengine.distributed.failures import ProcessError
from jengine.distributed.rendezvous import wait_for_all
from jengine.errors import ConfigError
from tests.distributed.test_processes import PATIENCE, address


def run_processes(*processes, timeout=PATIENCE):
    """Return the exception of each process, or None; a process is given as (count, index)."""
    coordinator = address()
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        futures = [pool.submit(wait_for_all, coordinator, count, index, timeout) for count, index in processes]
        return [future.exception() for future in futures]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_processes_continue_when_all_have_arrived(order):
    assert run_processes(*((3, index) for index in order)) == [None] * 3


def test_those_that_are_there_name_those_that_did_not_run_processes():
    for error in run_processes((4, 0), (4, 2), timeout=0.3):
        assert isinstance(error, ProcessError)
        assert str(error) == "process 1, process 3 did not reach the start within 0.3 s; 2 of 4 processes did"
        assert error.processes == [1, 3]


def test_a_missing_process_0_is_named_with_its_address():
    (error,) = run_processes((2, 1), timeout=0.3)
    assert isinstance(error, ProcessError)
    assert error.processes == [0]
    assert "process 0 does not answer at 127.0.0.1:" in str(error)


def test_two_processes_with_the_same_index_are_an_error_on_all():
    first, *others = run_processes((3, 0), (3, 1), (3, 1))
    for error in (first, *others):
        assert isinstance(error, ConfigError)
        assert "--process-id must be different on each process, got 1 from pid " in str(error)


def test_different_numbers_of_processes_are_an_error_on_all():
    for error in run_processes((2, 0), (3, 1)):
        assert isinstance(error, ConfigError)
        assert "--num-processes must be the same on all processes, got 2 on process 0 and 3 on process 1" in str(error)


def test_a_port_in_use_is_an_error():
    message = "process 0 cannot listen at port .*, of the coordinator: .*in use"
    with socket.create_server(("", 0)) as other, pytest.raises(ConfigError, match=message):
        wait_for_all(f"127.0.0.1:{other.getsockname()[1]}", 2, 0, 1.0)


def test_connections_of_other_programs_are_ignored():
    coordinator = address()
    host, port = coordinator.split(":")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(wait_for_all, coordinator, 2, 0, PATIENCE)
        while True:
            try:
                stranger = socket.create_connection((host, int(port)))
                break
            except OSError:
                continue
        with stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
        second = pool.submit(wait_for_all, coordinator, 2, 1, PATIENCE)
        assert first.exception() is second.exception() is None
