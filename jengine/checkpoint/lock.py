"""Lock that prevents two runs from training in the same work dir.

The lock is `flock` on a file in the work dir. The kernel releases it however the process ends, so a
killed run never blocks a resume, and network file systems support it across hosts. Unlike a POSIX
record lock it belongs to the open file: code that opens and closes `run.lock`, such as a copy of
the work dir, does not release it. Forked processes share the open file, so each closes it, or a
worker that outlives the run would keep the lock. The file's contents are for messages only: which
process holds the lock, and whether a run ended without releasing it.
"""

import atexit
import errno
import fcntl
import logging
import os
from pathlib import Path

import jax

from jengine.checkpoint.lock_holder import (
    LOCK,
    WorkDirLockedError,
    describe_holder,
    parse_holder,
    this_process,
)
from jengine.config.json_codec import encode
from jengine.config.storage import Lock, find_scheme

_LOGGER = logging.getLogger("jengine")
_HELD: set["WorkDirLock"] = set()  # by this process
_TAKEN = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP, errno.EINVAL)


class WorkDirLock:
    """Exclusive access to a work dir, from `acquire` to `release` or to the end of the process.

    With several processes, the first one holds the lock for all. On a file system that does not
    support locks, `acquire` warns and does nothing.

    Args:
      work_dir: the directory; created if it does not exist.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     lock = WorkDirLock(directory)
    ...     lock.acquire()
    ...     print(is_locked(directory))
    ...     lock.release()
    True
    """

    def __init__(self, work_dir: str | os.PathLike[str]) -> None:
        self._work_dir = Path(os.path.realpath(work_dir))  # a link to it is the same work dir
        self._path = self._work_dir / LOCK
        self._file: int | None = None

    def acquire(self) -> None:
        """Acquire the lock if this object does not hold it.

        Take over the lock of a killed run with a warning.

        Raises:
          WorkDirLockedError: another run holds it; the message names the process and host.
        """
        if self._file is not None or jax.process_index() != 0:
            return
        self._work_dir.mkdir(parents=True, exist_ok=True)
        file = self._open_locked()
        if file is None:
            return
        if previous := parse_holder(os.pread(file, 4096, 0)):
            _LOGGER.warning(
                "%s: the previous run (%s) ended without releasing its lock; taking over",
                self._work_dir,
                describe_holder(previous),
            )
        os.ftruncate(file, 0)  # the previous holder's text may be longer
        os.pwrite(file, encode(this_process()).encode(), 0)
        self._file = file
        _HELD.add(self)
        atexit.register(self.release)  # a normal end leaves no file behind

    def check(self, *, before_write: bool = False) -> None:
        """Do nothing: a live process cannot lose this lock, unlike that of a URL."""

    def release(self) -> None:
        """Release the lock and remove its file; do nothing if this object does not hold it."""
        if self._file is None:
            return
        # while locked, so nobody else can have created a new one
        self._path.unlink(missing_ok=True)
        os.close(self._file)
        self._file = None
        _HELD.discard(self)
        atexit.unregister(self.release)

    def _open_locked(self) -> int | None:
        """Return the locked file's descriptor; None if the file system does not support locks."""
        while True:
            file = os.open(self._path, os.O_RDWR | os.O_CREAT, 0o644)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                holder = parse_holder(os.pread(file, 4096, 0))
                os.close(file)
                if error.errno in _TAKEN:
                    raise WorkDirLockedError(self._work_dir, holder) from None
                if error.errno not in _UNSUPPORTED:
                    raise
                _LOGGER.warning(
                    "%s cannot be locked on this file system (%s): make sure that no other run "
                    "uses it",
                    self._work_dir,
                    error.strerror,
                )
                self._path.unlink(missing_ok=True)
                return None
            # Between opening and locking, the run that held the lock may have removed this file.
            if self._path.exists() and os.path.samestat(os.fstat(file), self._path.stat()):
                return file
            os.close(file)


def is_locked(work_dir: str | os.PathLike[str]) -> bool:
    """Return whether a run is training in `work_dir`, a directory or a URL, in this process or
    another.
    """
    if (scheme := find_scheme(work_dir)) is not None:
        return scheme.is_locked(work_dir)
    try:
        # without O_CREAT: a look leaves no file
        file = os.open(Path(os.path.realpath(work_dir), LOCK), os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.errno in _TAKEN
    finally:
        os.close(file)
    return False


def _forget_all() -> None:
    while _HELD:  # in a forked process, which does not hold the lock
        lock = _HELD.pop()
        if lock._file is not None:
            os.close(lock._file)
            lock._file = None


os.register_at_fork(after_in_child=_forget_all)


def make_lock(directory: str | os.PathLike[str]) -> Lock:
    """Return the lock for a local directory or a URL."""
    scheme = find_scheme(directory)
    return WorkDirLock(directory) if scheme is None else scheme.make_lock(directory)
