"""The processes are threads here."""

import concurrent.futures
import socket

import pytest

from jengine.distributed.failures import ProcessError
from jengine.distributed.rendezvous import meet
from jengine.errors import ConfigError
from tests.distributed.test_processes import PATIENCE, address


def come(*processes, timeout=PATIENCE):
    """What each of some processes, given by how many it thinks there are and which it is, returns or raises."""
    where = address()
    with concurrent.futures.ThreadPoolExecutor(len(processes)) as pool:
        futures = [pool.submit(meet, where, count, index, timeout) for count, index in processes]
        return [future.exception() for future in futures]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)])
def test_all_go_on_when_all_are_there(order):
    assert come(*((3, index) for index in order)) == [None] * 3


def test_those_that_are_there_name_those_that_did_not_come():
    for error in come((4, 0), (4, 2), timeout=0.3):
        assert isinstance(error, ProcessError)
        assert str(error) == "process 1, process 3 did not come to the start within 0.3 s; 2 of 4 processes did"
        assert error.processes == [1, 3]


def test_process_0_that_does_not_come_is_named_with_its_address():
    (error,) = come((2, 1), timeout=0.3)
    assert isinstance(error, ProcessError)
    assert error.processes == [0]
    assert "process 0 does not answer at 127.0.0.1:" in str(error)


def test_two_that_say_they_are_the_same_are_told_so():
    first, *others = come((3, 0), (3, 1), (3, 1))
    for error in (first, *others):
        assert isinstance(error, ConfigError)
        assert "there are two processes 1: pid " in str(error)


def test_different_numbers_of_processes_are_told():
    for error in come((2, 0), (3, 1)):
        assert isinstance(error, ConfigError)
        assert "was told of 3 processes, process 0 of 2" in str(error)


def test_a_port_in_use_is_told():
    message = "process 0 cannot listen at port .*, of the coordinator: .*in use"
    with socket.create_server(("", 0)) as other, pytest.raises(ConfigError, match=message):
        meet(f"127.0.0.1:{other.getsockname()[1]}", 2, 0, 1.0)


def test_strangers_are_not_counted():
    where = address()
    host, port = where.split(":")
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        first = pool.submit(meet, where, 2, 0, PATIENCE)
        while True:
            try:
                stranger = socket.create_connection((host, int(port)))
                break
            except OSError:
                continue
        with stranger:
            stranger.sendall(b"GET / HTTP/1.1\r\n")
        second = pool.submit(meet, where, 2, 1, PATIENCE)
        assert first.exception() is second.exception() is None
