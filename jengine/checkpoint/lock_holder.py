"""Holder of a lock on a work dir: who it is, and the error for a second run."""

import os
import socket
import time
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.json_codec import decode

LOCK = "run.lock"


class WorkDirLockedError(ConfigError):
    """Error of a run whose work dir another run trains in.

    Attributes:
      holder: the entries of the lock; {} if they are unknown.
      pid, host: where that run is; None if unknown.
    """

    def __init__(
        self, work_dir: str | os.PathLike[str], holder: Mapping[str, Any], problem: str = ""
    ) -> None:
        self.holder = dict(holder)
        self.pid: int | None = holder.get("pid")
        self.host: str | None = holder.get("host")
        advice = problem or (
            "two runs would remove each other's checkpoints: wait for it to end, stop it, or use "
            "another work_dir"
        )
        super().__init__(
            f"another run is training in {work_dir}: {describe_holder(holder)}; {advice}"
        )


def this_process() -> dict[str, Any]:
    """Return the entries of a lock that this process holds."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": time.strftime("%Y-%m-%d %H:%M:%S"),
    }


def parse_holder(content: bytes) -> dict[str, Any]:
    """Return the process and host that hold the lock; {} if they are missing or incomplete."""
    try:
        holder = decode(content)
    except ValueError:
        return {}
    return holder if isinstance(holder, dict) else {}


def describe_holder(holder: Mapping[str, Any]) -> str:
    """Return the holder as part of a sentence."""
    return f"process {holder.get('pid')} on host {holder.get('host')}, since {holder.get('since')}"
