"""What stands between a process and the coordination service; a server that says everything twice plays the service."""

import queue
import socket
import threading

import pytest

from jengine.distributed.coordinator_proxy import Link
from jengine.distributed.failures import FailureDetector
from tests.distributed.test_processes import free_port

PATIENCE = 30.0  # seconds; everything comes in milliseconds


class Server:
    """Takes one connection at a time."""

    def __init__(self, port=0):
        self.listener = socket.create_server(("127.0.0.1", port))
        self.address = f"127.0.0.1:{self.listener.getsockname()[1]}"
        self.connections = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def _run(self):
        connection, _ = self.listener.accept()
        self.connections.put(connection)
        while data := connection.recv(1000):
            connection.sendall(2 * data)
        self.connections.put("ended")


@pytest.fixture
def server():
    server = Server()
    yield server
    server.listener.close()


@pytest.fixture
def link(server):
    link = Link(server.address)
    yield link
    link.close()


def connect(link):
    host, port = link.address.split(":")
    local = socket.create_connection((host, int(port)))
    local.settimeout(PATIENCE)
    return local


def test_both_sides_hear_each_other(link):
    with connect(link) as local:
        local.sendall(b"one")
        assert local.recv(6, socket.MSG_WAITALL) == b"oneone"


def test_the_end_of_the_service_is_told_and_does_not_reach_the_process(link, server):
    lost = threading.Event()
    link.watch(lost.set)
    with connect(link) as local:
        local.sendall(b"one")
        assert local.recv(6, socket.MSG_WAITALL) == b"oneone"
        assert not lost.is_set()
        server.connections.get(timeout=PATIENCE).shutdown(socket.SHUT_RDWR)
        assert lost.wait(PATIENCE)
        local.settimeout(0.01)
        with pytest.raises(TimeoutError):  # neither data nor an end
            local.recv(1)


def test_the_end_of_the_process_reaches_the_service_and_is_no_loss(link, server):
    lost = threading.Event()
    link.watch(lost.set)
    connect(link).close()
    server.connections.get(timeout=PATIENCE)
    assert server.connections.get(timeout=PATIENCE) == "ended"
    link.close()
    assert not lost.is_set()


def test_a_process_may_come_before_the_service():
    port = free_port()
    link = Link(f"127.0.0.1:{port}")
    with connect(link) as local:
        local.sendall(b"one")
        server = Server(port)
        assert local.recv(6, socket.MSG_WAITALL) == b"oneone"
        server.listener.close()
    link.close()


class LostStore:
    """A store that answers until it is lost."""

    def __init__(self):
        self.values = {}
        self.lost = False

    def key_value_set(self, key, value, allow_overwrite=False):
        assert not self.lost, "this would wait for ever"
        self.values[key] = value

    def key_value_dir_get(self, key):
        assert not self.lost, "this would wait for ever"
        return [item for item in self.values.items() if item[0].startswith(f"{key}/")]


def test_a_lost_service_explains_what_breaks_without_being_asked():
    store = LostStore()
    store.values["jengine/who/0"] = "pid 7 on host a"
    detector = FailureDetector(store, 1, 2, poll=0.001, grace=0.0)
    detector._learn_names()
    detector._ending.set()  # as if the error were already on its way up
    store.lost = True
    detector.lose_service()
    with pytest.raises(
        RuntimeError, match=r"process 0 \(pid 7 on host a\) is gone: the connection to it broke"
    ) as raised:
        detector.diagnose(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    assert raised.value.processes == [0]


def test_a_lost_service_ends_a_process_that_waits_on_a_device(monkeypatch, capsys):
    ended = []
    monkeypatch.setattr(FailureDetector, "stop", lambda detector: ended.append(detector.index))
    store = LostStore()
    detector = FailureDetector(store, 1, 2, poll=0.001, grace=0.01)
    store.lost = True
    detector.lose_service()
    assert ended == [1]
    assert "jengine: ProcessError: process 0 is gone: the connection to it broke" in capsys.readouterr().err


def test_a_store_that_does_not_answer_is_lost_too(monkeypatch, capsys):
    ended, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(FailureDetector, "stop", lambda detector: ended.set())
    detector = FailureDetector(LostStore(), 1, 2, poll=0.001, grace=0.01, silence=0.05)
    monkeypatch.setattr(detector, "_look", lambda now: answer.wait(PATIENCE))
    detector.start()
    assert ended.wait(PATIENCE)
    answer.set()
    detector.stop_thread()
    assert "jengine: ProcessError: process 0 is gone: no answer for 0.05 s" in capsys.readouterr().err


def test_a_service_that_goes_after_the_end_is_no_loss(monkeypatch):
    detector = FailureDetector(LostStore(), 1, 2, poll=0.001, grace=0.01)
    detector.start()
    detector.stop_thread()
    monkeypatch.setattr(FailureDetector, "stop", lambda detector: pytest.fail("the run had ended"))
    detector.lose_service()
    detector.raise_failure()
