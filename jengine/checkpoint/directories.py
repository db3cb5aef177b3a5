"""Directories of a run's checkpoints: checked, locked, and without those of other runs."""

import contextlib
import os
import pathlib
import tempfile
from collections.abc import Iterable

from jengine.checkpoint.inventory import list_checkpoints
from jengine.checkpoint.layout import CURRENT_RUN, INCOMING, POINTER, read_meta, write_current_run
from jengine.checkpoint.lock import make_lock
from jengine.checkpoint.lock_holder import LOCK
from jengine.checkpoint.manifest import has_manifest, read_manifest
from jengine.errors import ConfigError


def check_directory(name: str, path: str) -> None:
    """Raise ConfigError unless a run can write files to the directory, which need not exist yet."""
    directory = path
    while not os.path.lexists(directory):
        directory = os.path.dirname(directory)
    if not os.path.isdir(directory):
        kind = "the file" if directory == path else f"{path} below the file"
        raise ConfigError(f"`{name}` must be a directory, got {kind} {directory}")
    try:
        os.rmdir(tempfile.mkdtemp(dir=directory))  # the mode alone does not say so
    except OSError as error:
        raise ConfigError(f"`{name}` must be writable, got {path}: {error.strerror}: {directory}") from error
    for file in (POINTER, CURRENT_RUN, LOCK, "config.py"):
        if os.path.isdir(os.path.join(path, file)):
            raise ConfigError(f"`{name}` must have no directory with the name of a file of the run, got {path}/{file}")


class CheckpointDirectories:
    """Directories that a run writes checkpoints to, locked, and without the checkpoints of other runs.

    Args:
      directories: the work dir, then further ones, such as those of hooks.
      run_id: distinguishes the checkpoints of this run.

    Raises:
      ConfigError: a directory cannot be written, or has checkpoints from another work dir.
    """

    def __init__(self, directories: Iterable[pathlib.Path], run_id: str) -> None:
        absolute = (pathlib.Path(os.path.abspath(path)) for path in directories)
        self._directories = list(dict.fromkeys(absolute))  # a hook may have the work dir too
        self._work_dir = self._directories[0]
        self._run_id = run_id
        self._locks = [make_lock(directory) for directory in self._directories]
        self._made: list[pathlib.Path] = []
        self._check()

    def lock(self) -> None:
        """Lock all directories; on an error, call `unlock`.

        Raises:
          WorkDirLockedError: another run has locked one. ConfigError: as the constructor.
        """
        missing = {path for own in self._directories for path in (own, *own.parents) if not path.exists()}
        self._made = sorted(missing, reverse=True)  # a directory before the one that it is in
        for directory, lock in zip(self._directories, self._locks, strict=True):
            try:
                lock.acquire()
            except OSError as error:
                raise ConfigError(f"`{self._name(directory)}` must be writable, got {directory}: {error}") from error
        self._check()  # again: another run may have trained since

    def check_locks(self, *, before_write: bool = False) -> None:
        """Raise WorkDirLockedError if another run has taken one of the directories over; see `Lease.check`."""
        for lock in self._locks:
            lock.check(before_write=before_write)

    def unlock(self) -> None:
        """Release the locks, and remove the directories that a refused run has made."""
        for lock in self._locks:
            lock.release()
        for directory in self._made:
            with contextlib.suppress(OSError):  # not empty
                directory.rmdir()

    def claim(self) -> list[str]:
        """Make the run the one that trains in the work dir, and move other checkpoints to `earlier_<n>`.

        The first step is atomic: a process that is killed after it leaves no other run's checkpoint to resume from.

        Returns:
          The directories with the moved checkpoints.
        """
        self._work_dir.mkdir(parents=True, exist_ok=True)
        write_current_run(self._work_dir, self._run_id)  # from here on `resume=True` finds only this run
        moved = (_move_others(directory, self._run_id) for directory in self._directories)
        return [str(path) for path in moved if path is not None]

    def _name(self, directory: pathlib.Path) -> str:
        return "work_dir" if directory == self._work_dir else "CheckpointHook.out_dir"

    def _check(self) -> None:
        for directory in self._directories:
            check_directory(self._name(directory), str(directory))
            if directory != self._work_dir:
                self._check_owner(directory)

    def _check_owner(self, directory: pathlib.Path) -> None:
        """Raise ConfigError if a run in another work dir, with the same last name, has checkpoints in `directory`."""
        for path in _list_others(directory, self._run_id):
            try:
                meta = read_meta(path).get("meta", {})
            except (OSError, ValueError):  # incomplete or damaged
                continue
            owner = meta.get("work_dir", self._work_dir)
            if os.path.realpath(owner) != os.path.realpath(self._work_dir):
                raise ConfigError(
                    f"`CheckpointHook.out_dir` must have checkpoints of one work dir in {directory}, got those of the "
                    f"run {meta.get('experiment_name')} of {owner} besides this run of {self._work_dir}, which would "
                    "move them away: use another out_dir, or a work_dir with another last name"
                )


def _list_others(directory: pathlib.Path, run_id: str) -> list[pathlib.Path]:
    """Return the checkpoints in `directory` that another run wrote; the next save removes interrupted ones."""

    def is_other(path: pathlib.Path) -> bool:
        manifest = read_manifest(path)
        is_interrupted = manifest is not None and not manifest.is_complete and path.suffix == INCOMING
        return not is_interrupted and (manifest is None or manifest.run != run_id)

    return [path for path in map(pathlib.Path, list_checkpoints(directory)) if has_manifest(path) and is_other(path)]


def _move_others(directory: pathlib.Path, run_id: str) -> pathlib.Path | None:
    others = _list_others(directory, run_id)
    if not others:
        return None
    number = 1
    while (target := directory / f"earlier_{number}").exists():
        number += 1
    target.mkdir()
    for path in others:
        path.rename(target / path.name)
    return target
