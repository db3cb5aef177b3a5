"""Connect a process to JAX's coordination service through a proxy that outlives the service.

JAX ends a process from C++ as soon as its connection to the service breaks, before Python can report the reason. With
a proxy in between, that connection stays open: the proxy reports the loss to Python instead. This file is also the
script that the proxy runs, with `python -I -S`, so it imports nothing but the standard library.
"""

import os
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable

_SCRIPT = pathlib.Path(__file__)
_LOST = "lost"
_BUFFER_SIZE = 2**16  # bytes
_RETRY_DELAY = 0.1  # seconds
_TIMEOUT = 30  # seconds after which a host that vanished silently counts as lost, roughly
# Only Linux has all of them. The last one covers data that was sent and not acknowledged: then no probes are sent.
_KEEPALIVE = dict(TCP_KEEPIDLE=15, TCP_KEEPINTVL=5, TCP_KEEPCNT=3, TCP_USER_TIMEOUT=1000 * _TIMEOUT)


class CoordinatorProxy:
    """Run a proxy of the coordination service in a child process, which ends with this process.

    Args:
      coordinator: `host:port` of the service, which may start later.

    Attributes:
      address: `host:port` of the proxy, to be used instead of `coordinator`.
    """

    def __init__(self, coordinator: str) -> None:
        host, _, port = coordinator.rpartition(":")
        # In a new session, a Ctrl-C in the terminal does not reach the proxy.
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), host.strip("[]"), port, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._process.stdout is not None
        self._output = self._process.stdout
        self.address = f"127.0.0.1:{int(self._output.readline())}"

    def watch(self, on_lost: Callable[[], None]) -> None:
        """Call `on_lost`, from a thread, if the connection to the service is lost."""

        def read() -> None:
            if self._output.readline().strip() == _LOST:
                on_lost()

        threading.Thread(target=read, name="jengine-coordinator-proxy", daemon=True).start()

    def close(self) -> None:
        """End the proxy before this process ends."""
        self._process.kill()
        self._process.wait()
        self._output.close()


# The rest runs in the child process.


class _Connection:
    """Forward data between a connection from the parent process and one to the service.

    Args:
      local: the socket to the parent process.
      remote: the socket to the service.
    """

    def __init__(self, local: socket.socket, remote: socket.socket) -> None:
        self._local = local
        self._remote = remote
        self._closed = threading.Lock()  # acquired by the thread that detects the end first, and never released

    def run(self) -> None:
        """Forward data in both directions until one side closes."""
        threading.Thread(target=self._forward, args=(self._local, self._remote), daemon=True).start()
        self._forward(self._remote, self._local)

    def _forward(self, source: socket.socket, target: socket.socket) -> None:
        closed = source
        try:
            while data := source.recv(_BUFFER_SIZE):
                closed = target
                target.sendall(data)
                closed = source
        except OSError:
            pass
        if not self._closed.acquire(blocking=False):
            return
        if closed is self._remote:
            print(_LOST, flush=True)
        else:
            self._remote.shutdown(socket.SHUT_RDWR)


def _connect(host: str, port: int) -> socket.socket:
    """Return a connection to the service; retry until it has started, since the parent has its own timeout."""
    while True:
        try:
            remote = socket.create_connection((host, port), timeout=_TIMEOUT)
        except OSError:
            time.sleep(_RETRY_DELAY)
            continue
        remote.settimeout(None)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _KEEPALIVE.items():
            if hasattr(socket, option):
                remote.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return remote


def _accept_connections(listener: socket.socket, host: str, port: int) -> None:
    def run_connection(local: socket.socket) -> None:
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        _Connection(local, _connect(host, port)).run()

    while True:
        local, _ = listener.accept()
        threading.Thread(target=run_connection, args=(local,), daemon=True).start()


def main() -> None:
    """Print the port of the proxy, and `lost` when the service is lost; exit with the parent process."""
    host, port, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent needs the proxy until it exits
        signal.signal(signum, signal.SIG_IGN)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_accept_connections, args=(listener, host, port), daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
