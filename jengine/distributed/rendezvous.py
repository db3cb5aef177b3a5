"""Wait for all processes of a run before JAX connects them.

JAX ends a process from C++, with a stack trace, if others are late or if two have the same index. Here that is an
exception on every process that has arrived. Process 0 listens for a moment at the address that its coordination service
will use.
"""

import contextlib
import json
import socket
import time
from typing import Any

from jengine.distributed.failures import ProcessError, describe_this_process
from jengine.errors import ConfigError

_RETRY_DELAY = 0.1  # seconds between two attempts to reach process 0
_GREETING_TIMEOUT = 5.0  # seconds that a new connection has to identify itself


def wait_for_all(coordinator: str, count: int, index: int, timeout: float) -> None:
    """Return, on every process, when all have arrived.

    Args:
      coordinator: `host:port` of process 0.
      count: number of processes.
      index: index of this process.
      timeout: seconds to wait for the others.

    Raises:
      ProcessError: some processes did not arrive; the message names them.
      ConfigError: two processes have the same index, or the numbers of processes differ, or process 0 cannot listen at
        its address.
    """
    host, _, port = coordinator.rpartition(":")
    if index:
        _join(host.strip("[]"), int(port), count, index, timeout)
    else:
        _serve(int(port), count, timeout)


def _serve(port: int, count: int, timeout: float) -> None:
    """Wait for the other processes and send them the outcome; for process 0."""
    deadline = time.monotonic() + timeout
    greetings: dict[int, dict[str, Any]] = {}  # by process
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listen(port))
        connections = []
        error: ProcessError | ConfigError | None = None
        missing: list[int] = []
        while len(greetings) < count - 1 and error is None:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                missing = [index for index in range(1, count) if index not in greetings]
                names = ", ".join(f"process {index}" for index in missing)
                arrived = f"{len(greetings) + 1} of {count} processes did"
                error = ProcessError(f"{names} did not reach the start within {timeout:g} s; {arrived}", missing)
                break
            stack.enter_context(connection)
            connection.settimeout(_GREETING_TIMEOUT)
            greeting = _receive(connection)
            if greeting is not None:  # otherwise it is not a process of this run
                connections.append(connection)
                error = _check_greeting(greeting, greetings, count)
                greetings[greeting["index"]] = greeting
        outcome = {"error": error and str(error), "missing": missing}
        for connection in connections:
            with contextlib.suppress(OSError):
                _send(connection, outcome)
    if error is not None:
        raise error


def _join(host: str, port: int, count: int, index: int, timeout: float) -> None:
    """Connect to process 0 and wait for the outcome; for all other processes."""
    deadline = time.monotonic() + timeout
    while True:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            message = f"process 0 does not answer at {host}:{port}: no connection within {timeout:g} s"
            raise ProcessError(message, [0])
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=remaining) as connection:
            _send(connection, {"index": index, "count": count, "identity": describe_this_process()})
            connection.settimeout(remaining + _GREETING_TIMEOUT)  # process 0 may answer at its own deadline
            outcome = _receive(connection)
            if outcome is not None:
                break
        time.sleep(_RETRY_DELAY)
    if outcome["missing"]:
        raise ProcessError(outcome["error"], outcome["missing"])
    if outcome["error"]:
        raise ConfigError(outcome["error"])


def _check_greeting(greeting: dict[str, Any], others: dict[int, dict[str, Any]], count: int) -> ConfigError | None:
    """Return the error if a process does not fit those that have arrived before."""
    index, identity = greeting["index"], greeting["identity"]
    if greeting["count"] != count:
        return ConfigError(
            f"--num-processes must be the same on all processes, got {count} on process 0 and {greeting['count']} on "
            f"process {index} ({identity})"
        )
    if index in others:
        return ConfigError(
            f"--process-id must be different on each process, got {index} from {others[index]['identity']} and from "
            f"{identity}"
        )
    return None


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"process 0 cannot listen at port {port}, of the coordinator: {error}") from error


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return a message, one line of JSON; None if the other side sends anything else, or nothing."""
    line = b""
    try:
        while not line.endswith(b"\n"):
            data = connection.recv(4096)
            if not data:
                return None
            line += data
        message = json.loads(line)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _send(connection: socket.socket, message: dict[str, Any]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")
