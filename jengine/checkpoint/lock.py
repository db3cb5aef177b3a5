"""Keeps two runs out of one work dir.

The lock is a POSIX record lock on a file in the work dir. Of the ways to lock, this one is released by the kernel
whatever ends the process, so that a killed run never blocks its own resume; it is not inherited by forked workers that
outlive the run; and it is the one that network file systems carry across hosts. What the file says is only for the
message: who holds it, and that a run ended without letting go.
"""

import atexit
import errno
import fcntl
import json
import logging
import os
import socket
import time
from pathlib import Path
from typing import Any

import jax

from jengine.errors import ConfigError

LOCK = "run.lock"

_LOGGER = logging.getLogger("jengine")
_HELD: dict[Path, "WorkDirLock"] = {}  # a record lock does not stop a second run in the same process
_TAKEN = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class WorkDirLockedError(ConfigError):
    """Another run is training in the work dir.

    Attributes:
      pid: its process; None where it could not be told.
      host: its host; likewise.
    """

    def __init__(self, work_dir: Path, holder: dict[str, Any]) -> None:
        self.pid: int | None = holder.get("pid")
        self.host: str | None = holder.get("host")
        super().__init__(
            f"another run is training in {work_dir}: {_describe(holder)}; two would remove each other's checkpoints: "
            "wait for it, end it, or give this one another work_dir"
        )


class WorkDirLock:
    """The right of one run to write into a work dir.

    It is held from `acquire` to `release`, or to the end of the process, however it ends. With several processes, the
    first one holds it for all. On a file system without locks it warns and holds nothing.

    Args:
      work_dir: the directory; made if it is not there.
    """

    def __init__(self, work_dir: str | os.PathLike[str]) -> None:
        self._work_dir = Path(os.path.realpath(work_dir))
        self._path = self._work_dir / LOCK
        self._file: int | None = None
        self._pid = 0

    def acquire(self) -> None:
        """Takes the lock; nothing happens if this object has it.

        A lock that a dead run left is taken over with a warning.

        Raises:
          WorkDirLockedError: another run has it; the message names its process and host.
        """
        if self._file is not None or jax.process_index() != 0:
            return
        if self._work_dir in _HELD:
            raise WorkDirLockedError(self._work_dir, _myself())
        self._work_dir.mkdir(parents=True, exist_ok=True)
        file = self._locked_file()
        if file is None:
            return
        if left := _read(file):
            _LOGGER.warning("%s: the run of %s ended without a release; taking over", self._work_dir, _describe(left))
        os.ftruncate(file, 0)
        os.pwrite(file, json.dumps(_myself()).encode(), 0)
        self._file, self._pid = file, os.getpid()
        _HELD[self._work_dir] = self
        atexit.register(self.release)

    def release(self) -> None:
        """Lets go of the lock and removes its file; nothing happens if this object does not have it."""
        if self._file is None or self._pid != os.getpid():  # a forked child has the object, but not the lock
            return
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None
        del _HELD[self._work_dir]
        atexit.unregister(self.release)

    def _locked_file(self) -> int | None:
        """The descriptor of the locked file that is at the path now; None where files cannot be locked."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = _read(file)
                os.close(file)
                if error.errno in _TAKEN:
                    raise WorkDirLockedError(self._work_dir, holder) from None
                if error.errno not in _UNSUPPORTED:
                    raise
                _LOGGER.warning(
                    "%s cannot be locked on this file system (%s): see that no second run uses it",
                    self._work_dir, error.strerror,
                )  # fmt: skip
                self._path.unlink(missing_ok=True)
                return None
            # Between opening and locking, the run that had it may have removed this very file.
            if self._path.exists() and os.path.samestat(os.fstat(file), self._path.stat()):
                return file
            os.close(file)


def is_locked(work_dir: str | os.PathLike[str]) -> bool:
    """Whether a run is training in `work_dir`, in this process or another."""
    root = Path(os.path.realpath(work_dir))
    if root in _HELD:
        return True
    try:
        file = os.open(root / LOCK, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(file)
    return False


def _myself() -> dict[str, Any]:
    return {"pid": os.getpid(), "host": socket.gethostname(), "since": time.strftime("%Y-%m-%d %H:%M:%S")}


def _read(file: int) -> dict[str, Any]:
    """What the holder has written; {} where it has not yet, or was killed while it did."""
    try:
        found = json.loads(os.pread(file, 4096, 0))
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}


def _describe(holder: dict[str, Any]) -> str:
    if not holder:
        return "a process that has not yet given its number"
    return f"process {holder.get('pid')} on host {holder.get('host')}, since {holder.get('since')}"
