"""How a checkpoint appears and disappears as a whole on a file system.

It is written to `epoch_5.incoming` and renamed once the manifest is complete; to remove it, it is
renamed to `epoch_5.outgoing` first. So a directory with a checkpoint's final name is complete
whenever the process is killed. The extra for URLs provides functions with the same names for
object storage, which has no rename.
"""

import contextlib
import os
import re
import shutil
from pathlib import Path, PurePath

from jengine.checkpoint.manifest import (
    BLOBS,
    COMMIT,
    META,
    STATE,
    at_urls,
    read_manifest,
    validate_checkpoint,
)
from jengine.config.storage import is_url, list_files, sync

INCOMING = ".incoming"
OUTGOING = ".outgoing"
# `.new` is the end of a name until `write_bytes` renames it
_NAMES = "|".join([*map(re.escape, (META, BLOBS, COMMIT)), r"manifest(\.\d+)?\.json"])
OWN = re.compile(rf"{STATE}/.*|({_NAMES})(\.new)?")


def beside(path: PurePath, suffix: str) -> PurePath:
    """Return the path with the suffix, next to `path`."""
    return path.with_name(path.name + suffix)


def find_incoming(path: PurePath) -> PurePath:
    """Return the directory that a save to `path` writes to."""
    return path if is_url(path) else beside(path, INCOMING)


def list_replaced(path: PurePath, run: str) -> list[str]:
    """Return the files that a save to `path` replaces.

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
    return files


def _list_own(path: PurePath) -> list[str] | None:
    """Return the files of a checkpoint, some of which may be missing; None if there is something
    else at `path`.
    """
    if not is_url(path) and (os.path.islink(path) or os.path.isfile(path)):
        return None
    files = list(list_files(path))
    return files if all(map(OWN.fullmatch, files)) else None


def is_own(path: PurePath) -> bool:
    """Return whether `path` is free, or has only files of a checkpoint."""
    return _list_own(path) is not None


@at_urls
def begin(path: PurePath, run: str) -> None:
    """Prepare a save to `path`, for which the caller writes the files to `find_incoming(path)` and
    seals them.

    Raises:
      FileExistsError: see `list_replaced`.
    """
    list_replaced(path, run)
    incoming = beside(path, INCOMING)
    _remove(incoming)  # of an interrupted save
    os.makedirs(incoming)


@at_urls
def finish(path: PurePath) -> None:
    """Give a sealed checkpoint its final name, in the place of one with the same name."""
    outgoing = beside(path, OUTGOING)
    if os.path.exists(path):
        _remove(outgoing)
        os.rename(path, outgoing)  # a rename over a directory with files fails
    os.rename(beside(path, INCOMING), path)
    sync(path.parent)  # the rename is on disk before anything older is removed
    _remove(outgoing)


@at_urls
def abandon(path: PurePath) -> None:
    """Remove what a failed save has written."""
    with contextlib.suppress(OSError):  # the reason of the failure matters more
        _remove(beside(path, INCOMING))


@at_urls
def delete(path: PurePath) -> None:
    """Remove a checkpoint; a process killed in the middle of it leaves nothing that looks like one.

    Raises:
      FileExistsError: the directory is not a checkpoint.
    """
    list_removable(path)
    outgoing = beside(path, OUTGOING)
    if os.path.exists(path):
        _remove(outgoing)
        os.rename(path, outgoing)
        _remove(outgoing)


@at_urls
def move(path: PurePath, target: PurePath) -> None:
    """Move a checkpoint."""
    os.rename(path, target)


@at_urls
def clean_up(directory: PurePath) -> None:
    """Finish or discard what killed runs have left unfinished.

    Call it before a save, while no other is in progress.
    """
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


def list_removable(path: PurePath) -> list[str]:
    """Return the files of a checkpoint; FileExistsError if there is something else."""
    files = _list_own(path)
    if files is None:
        raise FileExistsError(f"{path} is not a checkpoint of jengine, so it is not removed")
    return files


def _remove(directory: PurePath) -> None:
    if os.path.lexists(directory):
        list_removable(directory)
        shutil.rmtree(directory)
