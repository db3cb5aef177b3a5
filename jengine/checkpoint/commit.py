"""How a checkpoint appears and disappears as a whole, on a file system and on object storage.

On a file system it is written to `epoch_5.incoming` and renamed once the manifest is complete; to
remove it, it is renamed to `epoch_5.outgoing` first. So a directory with a checkpoint's final name
is complete whenever the process is killed.

Object storage has no rename. There the files are written under their final names and the manifest
is written last: a directory without one is no checkpoint. To remove a checkpoint, the manifest is
removed first. Objects with the names `epoch_5.incoming` and `epoch_5.outgoing` tell the next run
what a killed one has left unfinished.
"""

import contextlib
import os
import re
import shutil
from collections.abc import Iterable
from pathlib import Path, PurePath

from jengine.checkpoint.manifest import (
    BLOBS,
    COMMIT,
    MANIFEST,
    META,
    STATE,
    read_manifest,
    validate_checkpoint,
)
from jengine.config.storage import (
    StorageError,
    copy_file,
    is_url,
    list_directory,
    list_files,
    remove_files,
    sync,
    write_bytes,
)

INCOMING = ".incoming"
OUTGOING = ".outgoing"
_OWN = re.compile(
    "|".join(
        [rf"{STATE}/.*", *map(re.escape, (META, BLOBS, COMMIT)), r"manifest(\.\d+)?\.json(\.new)?"]
    )
)


def find_incoming(path: PurePath) -> PurePath:
    """Return the directory that a save to `path` writes to."""
    return path if is_url(path) else _beside(path, INCOMING)


def begin(path: PurePath, run: str) -> None:
    """Prepare a save to `path`, for which the caller writes the files to `find_incoming(path)` and
    seals them.

    On object storage a checkpoint with the same name is removed now.

    Raises:
      FileExistsError: `path` exists and is not a checkpoint of the run.
    """
    # What is at the path may be another run's, or a user's directory with such a name
    manifest = read_manifest(path)
    files = _list_own(path)
    if files is None or (manifest is not None and manifest.run != run):
        raise FileExistsError(
            f"{path} exists and is not a checkpoint of this run; move it elsewhere"
        )
    incoming = _beside(path, INCOMING)
    if not is_url(path):
        _remove(incoming)  # of an interrupted save
        os.makedirs(incoming)
        return
    # Before objects are removed: an object store cannot rename, so this mark says that what is
    # there is incomplete.
    write_bytes(incoming, run.encode())
    _remove_objects(path, files)


def _list_own(path: PurePath) -> list[str] | None:
    """Return the files of a checkpoint, some of which may be missing; None if there is something
    else at `path`.
    """
    files = list(list_files(path))
    if not is_url(path) and (os.path.islink(path) or os.path.isfile(path)):
        return None
    return files if all(map(_OWN.fullmatch, files)) else None


def is_own(path: PurePath) -> bool:
    """Return whether there is nothing at a local `path` but files of a checkpoint."""
    return _list_own(path) is not None


def finish(path: PurePath) -> None:
    """Give a sealed checkpoint its final name, in the place of one with the same name."""
    incoming = _beside(path, INCOMING)
    outgoing = _beside(path, OUTGOING)
    if is_url(path):
        remove_files([incoming])
        return
    if os.path.exists(path):
        _remove(outgoing)
        os.rename(path, outgoing)  # a rename over a directory with files fails
    os.rename(incoming, path)
    sync(path.parent)  # the rename is on disk before anything older is removed
    _remove(outgoing)


def abandon(path: PurePath) -> None:
    """Remove what a failed save has written."""
    with contextlib.suppress(OSError, StorageError):  # the reason of the failure matters more
        if not is_url(path):
            _remove(_beside(path, INCOMING))
        elif read_manifest(path) is None:
            _remove_objects(path, list_files(path))
            remove_files([_beside(path, INCOMING)])


def delete(path: PurePath) -> None:
    """Remove a checkpoint; a process killed in the middle of it leaves nothing that looks like one.

    Raises:
      FileExistsError: the directory is not a checkpoint.
    """
    files = _list_own(path)
    if files is None:
        raise FileExistsError(f"{path} is not a checkpoint of jengine, so it is not removed")
    outgoing = _beside(path, OUTGOING)
    if is_url(path):
        # The mark first: a kill between two removals leaves a checkpoint that is known to be half
        # removed.
        write_bytes(outgoing, b"")
        _remove_objects(path, files)
        remove_files([outgoing])
    elif os.path.exists(path):
        _remove(outgoing)
        os.rename(path, outgoing)
        _remove(outgoing)


def move(path: PurePath, target: PurePath) -> None:
    """Move a checkpoint; on object storage the store copies the files."""
    if not is_url(path):
        os.rename(path, target)
        return
    names = list_files(path)
    for name in sorted(names, key=lambda name: name == MANIFEST):  # the seal last
        copy_file(path / name, target / name)
    delete(path)


def clean_up(directory: PurePath) -> None:
    """Finish or discard what killed runs have left unfinished.

    Call it before a save, while no other is in progress.
    """
    if is_url(directory):
        for name, is_directory in list_directory(directory).items():
            # Only objects with a mark: a directory without one is whole, or was never ours.
            path = directory / name.removesuffix(INCOMING).removesuffix(OUTGOING)
            if is_directory or path.name == name:
                continue
            if name.endswith(OUTGOING) or read_manifest(path) is None:
                _remove_objects(path, list_files(path))
            remove_files([directory / name])
        return
    for incoming in filter(is_own, Path(directory).glob(f"*{INCOMING}")):
        path = incoming.with_name(incoming.name.removesuffix(INCOMING))
        # Killed between the seal and the rename: the save is complete, so the rename is made up
        # for.
        if not path.exists() and validate_checkpoint(incoming) is None:
            incoming.rename(path)
        else:
            shutil.rmtree(incoming)
    for outgoing in filter(is_own, Path(directory).glob(f"*{OUTGOING}")):
        shutil.rmtree(outgoing)


def _remove(directory: PurePath) -> None:
    if not os.path.lexists(directory):
        return
    if not is_own(directory):
        raise FileExistsError(f"{directory} is not removed: it is not a checkpoint")
    shutil.rmtree(directory)


def _beside(path: PurePath, suffix: str) -> PurePath:
    return path.with_name(path.name + suffix)


def _remove_objects(path: PurePath, names: Iterable[str]) -> None:
    """Remove the seals, then the other files of a checkpoint, of which some may be missing."""
    remove_files([path / MANIFEST])
    remove_files([path / COMMIT])
    remove_files(
        [path / name for name in names if name not in (MANIFEST, COMMIT) and _OWN.fullmatch(name)]
    )
