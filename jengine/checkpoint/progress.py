"""Barrier between processes that lasts as long as one of them makes progress.

A JAX barrier fails after a fixed time, but a process may hash or write for any time. So a wait is a
series of barriers: where one has timed out, all processes enter the next, until all have arrived. A
wait gives up when nothing has happened for a while: no process has reported that it read something,
and the files that the missing ones write have not grown, which is all that can be known about
Orbax's writes.
"""

import itertools
import re
import time
from pathlib import PurePath

import jax

from jengine.config.errors import read_seconds
from jengine.config.storage import list_files
from jengine.parallel.processes import get_client

_VARIABLE = "JENGINE_STALL_TIMEOUT"
_LIMIT = read_seconds(_VARIABLE, 600, least=1)
_COUNTER = "jengine/progress"  # of all processes together, in the coordination service
_last_report = -_LIMIT


class StalledError(TimeoutError):
    """Error of a wait for processes that make no progress."""


def report_progress() -> None:
    """Tell waiting processes that this one works; cheap, since most calls do nothing."""
    global _last_report
    now = time.monotonic()
    if now - _last_report >= _LIMIT / 10 and jax.distributed.is_initialized():
        _last_report = now
        get_client().key_value_increment(_COUNTER, 1)


def wait_for_processes(name: str, directory: PurePath | None = None) -> None:
    """Wait, in any thread, until all processes have called this with the same name.

    Args:
      name: the point in the save or the resume.
      directory: `state`, if they may be writing arrays to it.

    Raises:
      StalledError: no progress for the seconds in the environment variable JENGINE_STALL_TIMEOUT.
    """
    if jax.process_count() == 1:
        return
    client = get_client()
    seen = None
    since = time.monotonic()
    for attempt in itertools.count():
        try:
            client.wait_at_barrier(f"jengine/{name}/{attempt}", int(500 * _LIMIT))
            return
        except jax.errors.JaxRuntimeError as error:
            if "Barrier timed out" not in str(error):
                raise
            missing = re.findall(r"^(\d+)$", str(error), re.MULTILINE)
        progress = client.key_value_increment(_COUNTER, 0), _count_bytes(directory, missing)
        # also where this process came late, and runs through attempts that have failed
        if progress != seen:
            seen = progress
            since = time.monotonic()
        elif time.monotonic() - since >= 0.9 * _LIMIT:  # two more barriers have timed out
            raise StalledError(
                f"process {', '.join(missing)} made no progress for {_LIMIT:g} s ({_VARIABLE}), "
                f"and others wait for it ({name})"
            )


def _count_bytes(directory: PurePath | None, processes: list[str]) -> int:
    """Return the bytes that processes have written."""
    files = {} if directory is None else list_files(directory)
    own = tuple(f"ocdbt.process_{process}/" for process in processes)
    # the first one also merges the indices of the others
    own += ("d/",) if "0" in processes else ()
    return sum(info.size for name, info in files.items() if name.startswith(own))
