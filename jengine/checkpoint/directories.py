"""Directories of a run's checkpoints: checked, locked, and without those of other runs."""

import os
import pathlib
import tempfile
import uuid
from collections.abc import Iterable

from jengine.checkpoint import commit
from jengine.checkpoint.layout import (
    EARLIER,
    INCOMING,
    POINTER,
    find_manifests,
    read_current_run,
    read_meta,
    read_pointer,
    write_current_run,
)
from jengine.checkpoint.lock import make_lock
from jengine.checkpoint.manifest import read_manifest
from jengine.config.errors import ConfigError
from jengine.config.storage import (
    StorageError,
    find_scheme,
    is_url,
    list_directory,
    remove_files,
    storage_path,
    write_bytes,
)


def check_directory(name: str, path: str) -> None:
    """Raise ConfigError unless a run can write files to the directory or URL, which need not
    exist yet.
    """
    try:
        if is_url(path):
            probe = storage_path(name, path) / f".writable-{uuid.uuid4().hex}"
            write_bytes(probe, b"")
            remove_files([probe])
            return
        directory = path
        while not os.path.lexists(directory):
            directory = os.path.dirname(directory)
        os.rmdir(tempfile.mkdtemp(dir=directory))  # the mode alone does not say so
    except (OSError, StorageError) as error:
        raise ConfigError(f"`{name}` must be writable, got {path}: {error}") from error


class CheckpointDirectories:
    """Directories that a run writes checkpoints to, locked, and without the checkpoints of other
    runs.

    Args:
      directories: the work dir, then further ones, such as those of hooks.
      run_id: distinguishes the checkpoints of this run.

    Raises:
      ConfigError: a directory cannot be written, or has checkpoints from another work dir.
    """

    def __init__(self, directories: Iterable[str | os.PathLike[str]], run_id: str) -> None:
        absolute = (storage_path("work_dir", path) for path in directories)
        self._directories = list(dict.fromkeys(absolute))  # a hook may have the work dir too
        self._work_dir = self._directories[0]
        self._run_id = run_id
        self._locks = [make_lock(directory) for directory in self._directories]
        self._check()

    def lock(self) -> None:
        """Lock all directories; on an error, call `unlock`.

        Raises:
          WorkDirLockedError: another run has locked one. ConfigError: as the constructor.
        """
        for directory, lock in zip(self._directories, self._locks, strict=True):
            try:
                lock.acquire()
            except (OSError, StorageError) as error:
                raise ConfigError(
                    f"`{self._name(directory)}` must be writable, got {directory}: {error}"
                ) from error
        self._check()  # again: another run may have trained since

    def check_locks(self, *, before_write: bool = False) -> None:
        """Raise WorkDirLockedError if another run has taken one of the directories over.

        Args:
          before_write: ask a store that may not know of this run for some time.
        """
        for lock in self._locks:
            lock.check(before_write=before_write)

    def unlock(self) -> None:
        """Release the locks."""
        for lock in self._locks:
            lock.release()

    def claim(self) -> list[str]:
        """Make the run the one that trains in the work dir, and move other checkpoints to
        `earlier_<n>`.

        The first step is atomic: a process that is killed after it leaves no other run's checkpoint
        to resume from.

        Returns:
          The directories with the moved checkpoints.
        """
        directories = self._directories
        if is_url(self._work_dir) and read_current_run(self._work_dir) == self._run_id:
            # done when the run began: the manifests in a bucket are many requests
            directories = directories[1:]
        else:
            # from here on `resume=True` finds only this run
            write_current_run(self._work_dir, self._run_id)
            target, _ = read_pointer(self._work_dir)
            pointed = None if target is None else read_manifest(target)
            # before its checkpoint is moved away
            if pointed is None or pointed.run != self._run_id:
                remove_files([self._work_dir / POINTER])
        moved = (_move_others(directory, self._run_id) for directory in directories)
        return [str(path) for path in moved if path is not None]

    def _name(self, directory: pathlib.PurePath) -> str:
        return "work_dir" if directory == self._work_dir else "CheckpointHook.out_dir"

    def _check(self) -> None:
        for directory in self._directories:
            if (scheme := find_scheme(directory)) is not None:
                scheme.check_processes(self._name(directory), directory)
            else:  # at a URL the lock shows it
                check_directory(self._name(directory), str(directory))
            if directory != self._work_dir:
                self._check_owner(directory)

    def _check_owner(self, directory: pathlib.PurePath) -> None:
        """Raise ConfigError if a run in another work dir, with the same last name, has
        checkpoints in `directory`.
        """
        for path in _list_others(directory, self._run_id):
            try:
                meta = read_meta(path).get("meta", {})
            except (OSError, ValueError):  # incomplete or damaged
                continue
            owner = meta.get("work_dir", self._work_dir)
            if _resolve(owner) != _resolve(self._work_dir):
                raise ConfigError(
                    "`CheckpointHook.out_dir` must have checkpoints of one work dir in "
                    f"{directory}, got those of the run {meta.get('experiment_name')} of {owner} "
                    f"besides this run of {self._work_dir}, which would move them away: use "
                    "another out_dir, or a work_dir with another last name"
                )


def _resolve(path: str | os.PathLike[str]) -> str:
    return os.fspath(path) if is_url(path) else os.path.realpath(path)


def _list_others(directory: pathlib.PurePath, run_id: str) -> list[pathlib.PurePath]:
    """Return the checkpoints in `directory` that another run wrote.

    The next save removes interrupted ones.
    """
    return [
        path
        for path, manifest in find_manifests(directory).items()
        # A directory with other files is the user's own, even with a name like a checkpoint's.
        if (path.suffix != INCOMING if manifest is None else manifest.run != run_id)
        and (is_url(path) or commit.is_own(path))
    ]


def _move_others(directory: pathlib.PurePath, run_id: str) -> pathlib.PurePath | None:
    others = _list_others(directory, run_id)
    if not others:
        return None
    taken = list_directory(directory)
    number = 1
    while f"{EARLIER}{number}" in taken:
        number += 1
    # A new directory each time: two earlier runs may have checkpoints with equal names.
    target = directory / f"{EARLIER}{number}"
    if not is_url(target):
        os.mkdir(target)
    for path in others:
        commit.move(path, target / path.name)
    return target
