"""How a process reaches JAX's coordination service, and outlives it for long enough to say why it ends."""

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


class Link:
    """A relay to the coordination service, in a process of its own, which ends with this one.

    Args:
      coordinator: `host:port` of the service; it need not be there yet.

    Attributes:
      address: `host:port` to take in the place of `coordinator`.
    """

    def __init__(self, coordinator: str) -> None:
        host, _, port = coordinator.rpartition(":")
        # In a session of its own, a Ctrl-C in the terminal does not reach it.
        self._relay = subprocess.Popen(
            [sys.executable, "-I", "-S", str(_SCRIPT), host.strip("[]"), port, str(os.getpid())],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        assert self._relay.stdout is not None
        self._output = self._relay.stdout
        self.address = f"127.0.0.1:{int(self._output.readline())}"

    def watch(self, lost: Callable[[], None]) -> None:
        """Calls `lost`, from a thread, if the service is gone."""

        def read() -> None:
            if self._output.readline().strip() == "lost":
                lost()

        threading.Thread(target=read, name="jengine-link", daemon=True).start()

    def close(self) -> None:
        """Ends the relay before that."""
        self._relay.kill()
        self._relay.wait()
        self._output.close()


_PIECE = 2**16  # bytes
_RETRY = 0.1  # seconds
_PATIENCE = 30  # seconds: a host that vanished without a word is noticed after about as many
# Only Linux has all of them. The last is for what was sent and not acknowledged, while which nothing is probed.
_SILENCE = dict(TCP_KEEPIDLE=15, TCP_KEEPINTVL=5, TCP_KEEPCNT=3, TCP_USER_TIMEOUT=1000 * _PATIENCE)


class Connection:
    """One connection of the process, and the one to the service that it stands for.

    Args:
      local: the process's side.
      remote: the service's side.
    """

    def __init__(self, local: socket.socket, remote: socket.socket) -> None:
        self._local = local
        self._remote = remote
        self._over = threading.Lock()  # held for ever by whoever notices the end first

    def run(self) -> None:
        """Passes on what both sides say until one of them ends."""
        threading.Thread(target=self._pass_on, args=(self._local, self._remote), daemon=True).start()
        self._pass_on(self._remote, self._local)

    def _pass_on(self, source: socket.socket, target: socket.socket) -> None:
        ended = source
        try:
            while data := source.recv(_PIECE):
                ended = target
                target.sendall(data)
                ended = source
        except OSError:
            pass
        if not self._over.acquire(blocking=False):
            return
        if ended is self._remote:
            print("lost", flush=True)
        else:
            self._remote.shutdown(socket.SHUT_RDWR)


def _dial(host: str, port: int) -> socket.socket:
    """A connection to the service, which may not be there yet; the process knows how long it wants to wait."""
    while True:
        try:
            remote = socket.create_connection((host, port), timeout=_PATIENCE)
        except OSError:
            time.sleep(_RETRY)
            continue
        remote.settimeout(None)
        remote.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        remote.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in _SILENCE.items():
            if hasattr(socket, option):
                remote.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
        return remote


def _serve(listener: socket.socket, host: str, port: int) -> None:
    def stand_for(local: socket.socket) -> None:
        local.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        Connection(local, _dial(host, port)).run()

    while True:
        local, _ = listener.accept()
        threading.Thread(target=stand_for, args=(local,), daemon=True).start()


def main() -> None:
    """Writes the port on which it listens, then `lost` when the service is; ends with its parent."""
    host, port, parent = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # the parent decides when it has heard enough
        signal.signal(number, signal.SIG_IGN)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    threading.Thread(target=_serve, args=(listener, host, port), daemon=True).start()
    while os.getppid() == parent:
        time.sleep(0.5)


if __name__ == "__main__":
    main()
