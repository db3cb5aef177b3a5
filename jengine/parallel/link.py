"""How a process reaches JAX's coordination service, and outlives it for long enough to say why it ends."""

import os
import pathlib
import subprocess
import sys
import threading
from collections.abc import Callable

_SCRIPT = pathlib.Path(__file__).parent / "relay.py"


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
