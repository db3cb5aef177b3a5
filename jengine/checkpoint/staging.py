"""Local copies of arrays for stores that Orbax cannot reach: it writes files and `gs://`, but not `s3://`.

A save writes to a temporary directory and uploads the files; a restore downloads them first. So the local disk needs
room for a checkpoint, and one process must hold the whole state: Orbax merges the files of several in one directory.
"""

import os
import tempfile
from collections.abc import Callable
from pathlib import PurePath
from typing import Any

import jax

from jengine.errors import ConfigError
from jengine.storage import download_file, is_url, list_files, upload_file

_copy: tuple[Any, tempfile.TemporaryDirectory[str]] | None = None  # the last one: a restore opens it several times


def is_staged(directory: str | os.PathLike[str]) -> bool:
    """Return whether Orbax needs a local copy.

    >>> is_staged("s3://bucket/run/iter_1/state"), is_staged("gs://bucket/run/iter_1/state")
    (True, False)
    """
    return is_url(directory) and not os.fspath(directory).startswith("gs://")


def check_processes(name: str, directory: str | os.PathLike[str]) -> None:
    """Raise ConfigError if several processes cannot save to `directory`."""
    if is_staged(directory) and jax.process_count() > 1:
        raise ConfigError(
            f"`{name}` must be a local path or a URL of gs:// with {jax.process_count()} processes, got "
            f"{os.fspath(directory)!r}: Orbax has no driver for this store, and cannot merge files of several hosts"
        )


def upload_after(
    write: Callable[[PurePath], Callable[[], None]], directory: PurePath, prepare: Callable[[], None] = lambda: None
) -> Callable[[], None]:
    """Start `write` with a local directory; return a function that finishes it, calls `prepare` and uploads."""
    folder = tempfile.TemporaryDirectory(prefix="jengine-save-")
    local = PurePath(folder.name, directory.name)
    # The write has begun when this returns, so that the arrays may be donated; sending is left to the background.
    finish_write = write(local)

    def finish() -> None:
        # Removed in any case: a failed upload must not fill the disk with copies.
        with folder:
            finish_write()
            prepare()
            for name in list_files(local):
                upload_file(local / name, directory / name)

    return finish


def find_local(directory: PurePath) -> PurePath:
    """Return a local copy of `directory`, which lasts until that of another is made; itself if Orbax can read it."""
    global _copy
    if not is_staged(directory):
        return directory
    files = list_files(directory)
    key = (os.fspath(directory), files)
    if _copy is None or _copy[0] != key:
        folder = tempfile.TemporaryDirectory(prefix="jengine-restore-")
        for name in files:
            os.makedirs(os.path.dirname(os.path.join(folder.name, name)), exist_ok=True)
            download_file(directory / name, os.path.join(folder.name, name))
        _copy = (key, folder)  # which removes the previous one
    return PurePath(_copy[1].name)
