"""Local copies of arrays in buckets for Orbax, which cannot verify what it reads, nor reach each
store.

From a bucket, a restore downloads the files of the arrays and compares them with the manifest's
hashes before Orbax reads them; only several processes read `gs://` directly, each what its devices
hold. Orbax writes files and `gs://`: for `s3://`, a save writes to a temporary directory and
uploads the files. So the local disk needs room for a checkpoint, and one process must hold the
whole state: Orbax merges the files of several in one directory.
"""

import concurrent.futures
import os
import tempfile
from collections.abc import Callable, Iterable
from pathlib import Path, PurePath
from typing import Any

from jengine.checkpoint.manifest import confirm, find_damage, read_manifest
from jengine.config.storage import (
    FileInfo,
    StorageError,
    list_files,
)
from jengine.extras.cloud.url_files import download_file, upload_file

_ATTEMPTS = 3  # of a download
_TRANSFERS = 16  # at a time
# the last one: a restore opens it several times
_copy: tuple[Any, tempfile.TemporaryDirectory[str]] | None = None


def upload_after(
    write: Callable[[PurePath], Callable[[], None]],
    directory: PurePath,
    prepare: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Start `write` with a local directory.

    Return a function that finishes it, calls `prepare` and uploads.
    """
    folder = tempfile.TemporaryDirectory(prefix="jengine-save-")
    local = PurePath(folder.name, directory.name)
    # The write has begun when this returns, so that the arrays may be donated; sending is left to
    # the background.
    finish_write = write(local)

    def finish() -> None:
        # Removed in any case: a failed upload must not fill the disk with copies.
        with folder:
            finish_write()
            prepare()
            names = list(list_files(local))
            with concurrent.futures.ThreadPoolExecutor(_TRANSFERS) as pool:
                list(pool.map(lambda name: upload_file(local / name, directory / name), names))
            if problem := confirm(lambda: _compare_upload(local, directory, names)):
                raise StorageError(f"{directory} was not uploaded as it was written: {problem}")

    return finish


def _compare_upload(local: PurePath, directory: PurePath, names: Iterable[str]) -> str | None:
    found = list_files(directory)
    stored = {name: found.get(name, FileInfo(-1)) for name in names}
    problems = (
        find_damage(local / name, name, info.size, info.md5 and f"md5:{info.md5}")
        for name, info in stored.items()
    )
    return next(filter(None, problems), None)


def copy_arrays(directory: PurePath) -> PurePath:
    """Return a local copy of the directory of arrays at a URL, which lasts until another is made.

    Raises:
      StorageError: a download fails, or its bytes are not those of the manifest, at each attempt.
    """
    global _copy
    files = list_files(directory)
    key = (os.fspath(directory), files)
    if _copy is None or _copy[0] != key:
        folder = tempfile.TemporaryDirectory(prefix="jengine-restore-")
        manifest = read_manifest(directory.parent)  # Orbax's own checkpoints have none
        sealed = {} if manifest is None else manifest.files

        def fetch(name: str) -> None:
            listed = (files[name].size, files[name].md5 and f"md5:{files[name].md5}")
            _download(
                directory / name,
                Path(folder.name, name),
                *sealed.get(f"{directory.name}/{name}", listed),
            )

        with concurrent.futures.ThreadPoolExecutor(_TRANSFERS) as pool:
            list(pool.map(fetch, files))  # which raises errors
        _copy = (key, folder)  # which removes the previous one
    return PurePath(_copy[1].name)


def _download(url: PurePath, target: Path, size: int, digest: str | None) -> None:
    os.makedirs(target.parent, exist_ok=True)
    problem = None
    for _ in range(_ATTEMPTS):
        download_file(url, target, {})  # compared below with what the manifest says
        if (problem := find_damage(target, target.name, size, digest)) is None:
            return
    raise StorageError(f"{url} has other bytes at each download: {problem}")
