"""Optuna's file for the search of a sweep, which several runs write to."""

import fcntl
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.storage import check_regular

# seconds that a process waits for the others, which hold the lock for milliseconds
_PATIENCE = 60.0
_PAUSE = 0.05  # seconds
_LOGGER = logging.getLogger("jengine")


class StudyLock:
    """Lock for the file of a study.

    The kernel releases it when a process ends. Optuna's own is a second file, for which others wait
    half a minute after a kill, and for ever if it is a link and the directory has moved.

    Args:
      path: the file.
      patience: seconds to wait for another process.
    """

    def __init__(self, path: str, patience: float = _PATIENCE) -> None:
        self._path = path
        self._patience = patience
        self._file = -1

    def acquire(self) -> bool:
        """Take the lock, and remove an incomplete last line, which a killed process has left.

        Raises:
          TimeoutError: another process, which may be stopped, has held it all the time.
        """
        deadline = time.monotonic() + self._patience
        file = os.open(self._path, os.O_RDWR | os.O_NONBLOCK)
        try:
            while not _try_lock(file):
                if time.monotonic() > deadline:
                    raise TimeoutError(
                        f"another process has locked {self._path} for {self._patience:g} s"
                    )
                time.sleep(_PAUSE)
            _cut_incomplete_line(file, self._path)
        except BaseException:
            os.close(file)
            raise
        self._file = file
        return True

    def release(self) -> None:
        """Release the lock."""
        os.close(self._file)


def open_journal(path: str, patience: float = _PATIENCE) -> Any:
    """Return Optuna's storage in a file, which is created if it does not exist.

    Raises:
      ConfigError: the file is damaged or not a file.
    """
    from optuna.storages import JournalStorage
    from optuna.storages.journal import JournalFileBackend

    with named_errors(path):
        check_regular(path)  # a pipe would block
        lock: Any = StudyLock(path, patience)
        return JournalStorage(JournalFileBackend(path, lock_obj=lock))


@contextmanager
def named_errors(path: str) -> Iterator[None]:
    """Raise a ConfigError with the path for any error of Optuna, whose own do not have it."""
    try:
        yield
    except Exception as error:  # of JSON, of the file, or an assertion
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(
            f"{path} must be the file of a search that can be read and written, got "
            f"{type(error).__name__}: {reason}"
        ) from error


def _try_lock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _cut_incomplete_line(file: int, path: str) -> None:
    size = os.fstat(file).st_size
    if size == 0 or os.pread(file, 1, size - 1) == b"\n":
        return
    # Whatever is appended would become a part of this line, and make the whole file unreadable.
    end = os.pread(file, size, 0).rfind(b"\n") + 1
    _LOGGER.warning(
        "removed an incomplete line, which a killed process has left, from the end of %s", path
    )
    os.ftruncate(file, end)
