"""Test the proxy of the coordination service, with a server as the service that sends all data back twice."""

import queue
import socket
import threading

import pytest

from jengine.distributed.coordinator_proxy import CoordinatorProxy
from jengine.distributed.failures import FailureDetector
from tests.distributed.test_processes import free_port

PATIENCE = 30.0  # seconds; every wait takes milliseconds


class Server:
    """Accept one connection and send back all data twice."""

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
        self.connections.put("closed")


@pytest.fixture
def server():
    server = Server()
    yield server
    server.listener.close()


@pytest.fixture
def proxy(server):
    proxy = CoordinatorProxy(server.address)
    yield proxy
    proxy.close()


def connect(proxy):
    host, port = proxy.address.split(":")
    local = socket.create_connection((host, int(port)))
    local.settimeout(PATIENCE)
    return local


def test_data_is_forwarded_in_both_directions(proxy):
    with connect(proxy) as local:
        local.sendall(b"one")
        assert local.recv(6, socket.MSG_WAITALL) == b"oneone"


def test_a_lost_service_is_reported_and_the_connection_of_the_process_stays_open(proxy, server):
    lost = threading.Event()
    proxy.watch(lost.set)
    with connect(proxy) as local:
        local.sendall(b"one")
        assert local.recv(6, socket.MSG_WAITALL) == b"oneone"
        assert not lost.is_set()
        server.connections.get(timeout=PATIENCE).shutdown(socket.SHUT_RDWR)
        assert lost.wait(PATIENCE)
        local.settimeout(0.01)
        with pytest.raises(TimeoutError):  # neither data nor the end of the connection
            local.recv(1)


def test_a_connection_closed_by_the_process_is_closed_at_the_service_and_not_reported(proxy, server):
    lost = threading.Event()
    proxy.watch(lost.set)
    connect(proxy).close()
    server.connections.get(timeout=PATIENCE)
    assert server.connections.get(timeout=PATIENCE) == "closed"
    proxy.close()
    assert not lost.is_set()


def test_a_process_may_connect_before_the_service_starts():
    port = free_port()
    proxy = CoordinatorProxy(f"127.0.0.1:{port}")
    with connect(proxy) as local:
        local.sendall(b"one")
        server = Server(port)
        assert local.recv(6, socket.MSG_WAITALL) == b"oneone"
        server.listener.close()
    proxy.close()


class LostStore:
    """Answer until `lost` is set."""

    def __init__(self):
        self.values = {}
        self.lost = False

    def key_value_set(self, key, value, allow_overwrite=False):
        assert not self.lost, "this would block forever"
        self.values[key] = value

    def key_value_dir_get(self, key):
        assert not self.lost, "this would block forever"
        return [item for item in self.values.items() if item[0].startswith(f"{key}/")]


def test_a_runtime_error_is_explained_by_a_lost_service_without_reading_the_store():
    store = LostStore()
    store.values["jengine/identities/0"] = "pid 7 on host a"
    detector = FailureDetector(store, 1, 2, poll=0.001, grace=0.0)
    detector._read_identities()
    detector._exiting.set()  # as if the exception were already raised
    store.lost = True
    detector.handle_lost_service()
    with pytest.raises(
        RuntimeError, match=r"process 0 \(pid 7 on host a\) is gone: the connection to it broke"
    ) as raised:
        detector.diagnose(ValueError("UNKNOWN: Gloo all-reduce failed: Connection reset by peer"))
    assert raised.value.processes == [0]


def test_a_lost_service_ends_a_process_that_waits_on_a_device(monkeypatch, capsys):
    stopped = []
    monkeypatch.setattr(FailureDetector, "stop", lambda detector: stopped.append(detector.index))
    store = LostStore()
    detector = FailureDetector(store, 1, 2, poll=0.001, grace=0.01)
    store.lost = True
    detector.handle_lost_service()
    assert stopped == [1]
    assert "jengine: ProcessError: process 0 is gone: the connection to it broke" in capsys.readouterr().err


def test_a_store_that_does_not_answer_counts_as_lost(monkeypatch, capsys):
    stopped, answer = threading.Event(), threading.Event()
    monkeypatch.setattr(FailureDetector, "stop", lambda detector: stopped.set())
    detector = FailureDetector(LostStore(), 1, 2, poll=0.001, grace=0.01, heartbeat_timeout=0.05)
    monkeypatch.setattr(detector, "_read_store", lambda now: answer.wait(PATIENCE))
    detector.start()
    assert stopped.wait(PATIENCE)
    answer.set()
    detector.stop_thread()
    assert "jengine: ProcessError: process 0 is gone: no answer for 0.05 s" in capsys.readouterr().err


def test_a_service_that_stops_after_the_run_is_not_reported(monkeypatch):
    detector = FailureDetector(LostStore(), 1, 2, poll=0.001, grace=0.01)
    detector.start()
    detector.stop_thread()
    monkeypatch.setattr(FailureDetector, "stop", lambda detector: pytest.fail("the run had ended"))
    detector.handle_lost_service()
    detector.raise_failure()
