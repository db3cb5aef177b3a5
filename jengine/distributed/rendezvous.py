"""Where the processes of a run meet before JAX connects them.

JAX ends a process from C++, with a stack trace, when others do not come in time or come twice. Here that is an error,
on every process that is there. Process 0 listens for a moment at the address that its coordination service will have.
"""

import contextlib
import json
import os
import socket
import time
from typing import Any

from jengine.distributed.failures import ProcessError
from jengine.errors import ConfigError

_RETRY = 0.1  # seconds between two attempts to reach process 0
_HELLO = 5.0  # seconds in which whoever connects says who it is


def meet(coordinator: str, count: int, index: int, timeout: float) -> None:
    """Returns, on every process, when all are there.

    Args:
      coordinator: `host:port` of process 0.
      count: how many processes there are.
      index: this one.
      timeout: seconds to wait for the others.

    Raises:
      ProcessError: some did not come; the message names them.
      ConfigError: two say that they are the same process, or they do not agree on how many there are, or process 0
        cannot listen at its address.
    """
    host, _, port = coordinator.rpartition(":")
    if index:
        _attend(host.strip("[]"), int(port), count, index, timeout)
    else:
        _hold(int(port), count, timeout)


def _hold(port: int, count: int, timeout: float) -> None:
    """Process 0: waits for the others and tells them how it went."""
    deadline = time.monotonic() + timeout
    there: dict[int, dict[str, Any]] = {}
    with contextlib.ExitStack() as open_until_told:
        listener = open_until_told.enter_context(_listen(port))
        guests = []
        problem: Exception | None = None
        while len(there) < count - 1 and problem is None:
            listener.settimeout(max(deadline - time.monotonic(), 0.001))
            try:
                guest, _ = listener.accept()
            except TimeoutError:
                missing = [index for index in range(1, count) if index not in there]
                names = ", ".join(f"process {index}" for index in missing)
                came = f"{len(there) + 1} of {count} processes did"
                problem = ProcessError(f"{names} did not come to the start within {timeout:g} s; {came}", missing)
                break
            open_until_told.enter_context(guest)
            guest.settimeout(_HELLO)
            hello = _read(guest)
            if hello is not None:  # else it is none of ours
                guests.append(guest)
                problem = _unfit(hello, there, count)
                there[hello["index"]] = hello
        told = {"problem": problem and str(problem), "missing": getattr(problem, "processes", None)}
        for guest in guests:
            with contextlib.suppress(OSError):
                _write(guest, told)
    if problem is not None:
        raise problem


def _attend(host: str, port: int, count: int, index: int, timeout: float) -> None:
    """Another process: says that it is there and hears how it went."""
    deadline = time.monotonic() + timeout
    late = f"process 0 does not answer at {host}:{port}: no connection within {timeout:g} s"
    while True:
        left = deadline - time.monotonic()
        if left <= 0:
            raise ProcessError(late, [0])
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=left) as door:
            _write(door, {"index": index, "count": count, "who": f"pid {os.getpid()} on host {socket.gethostname()}"})
            door.settimeout(left + _HELLO)  # what process 0 says at its own deadline is still to be heard
            told = _read(door)
            if told is not None:
                break
        time.sleep(_RETRY)
    if told["missing"]:
        raise ProcessError(told["problem"], told["missing"])
    if told["problem"]:
        raise ConfigError(told["problem"])


def _unfit(hello: dict[str, Any], there: dict[int, dict[str, Any]], count: int) -> ConfigError | None:
    """What is wrong with a process that has come."""
    index, who = hello["index"], hello["who"]
    if hello["count"] != count:
        return ConfigError(f"process {index} ({who}) was told of {hello['count']} processes, process 0 of {count}")
    if index in there:
        return ConfigError(f"there are two processes {index}: {there[index]['who']} and {who}")
    return None


def _listen(port: int) -> socket.socket:
    try:
        if socket.has_dualstack_ipv6():
            return socket.create_server(("", port), family=socket.AF_INET6, dualstack_ipv6=True)
        return socket.create_server(("", port))
    except OSError as error:
        raise ConfigError(f"process 0 cannot listen at port {port}, of the coordinator: {error}") from error


def _read(door: socket.socket) -> dict[str, Any] | None:
    """One line of JSON; None from whoever says anything else, or nothing."""
    text = b""
    try:
        while not text.endswith(b"\n"):
            piece = door.recv(4096)
            if not piece:
                return None
            text += piece
        message = json.loads(text)
    except (OSError, ValueError):
        return None
    return message if isinstance(message, dict) else None


def _write(door: socket.socket, message: dict[str, Any]) -> None:
    door.sendall(json.dumps(message).encode() + b"\n")
