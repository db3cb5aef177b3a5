"""How a checkpoint in a bucket appears, is verified and disappears as a whole.

Object storage has no rename: the files are written under their final names and the manifest is
written last, so a directory without one is no checkpoint. To remove a checkpoint, the manifest is
removed first. Objects with the names `epoch_5.incoming` and `epoch_5.outgoing` tell the next run
what a killed one has left unfinished. A listing tells the size and the MD5 of each object: nothing
is read to seal or to verify them.
"""

import contextlib
import hashlib
import time
import uuid
from collections.abc import Iterable, Mapping
from pathlib import PurePath

from jengine.checkpoint.commit import INCOMING, OUTGOING, OWN, beside, list_removable, list_replaced
from jengine.checkpoint.manifest import (
    COMMIT,
    MANIFEST,
    MD5,
    META,
    STATE,
    DamagedFileError,
    Files,
    check_file,
    open_manifest,
    read_manifest,
)
from jengine.config.storage import (
    FileInfo,
    StorageError,
    list_directory,
    list_files,
    remove_files,
    write_bytes,
)
from jengine.extras.cloud.url_files import copy_file

_LAG = 60  # seconds that a listing may take to show a new object


def begin(path: PurePath, run: str) -> None:
    """Prepare a save to `path`, from which a checkpoint with the same name is removed now."""
    files = list_replaced(path, run)
    # Before objects are removed: this mark says that what is there is incomplete.
    write_bytes(beside(path, INCOMING), run.encode())
    _remove_objects(path, files)


def finish(path: PurePath) -> None:
    """Remove the mark of a save that is sealed."""
    remove_files([beside(path, INCOMING)])


def abandon(path: PurePath) -> None:
    """Remove what a failed save has written."""
    with contextlib.suppress(OSError, StorageError):  # the reason of the failure matters more
        if read_manifest(path) is None:
            _remove_objects(path, list_files(path))
            finish(path)


def delete(path: PurePath) -> None:
    """Remove a checkpoint, the mark first: a kill in the middle leaves one that is known to be half
    removed.

    Raises:
      FileExistsError: the directory is not a checkpoint.
    """
    files = list_removable(path)
    outgoing = beside(path, OUTGOING)
    write_bytes(outgoing, b"")
    _remove_objects(path, files)
    remove_files([outgoing])


def move(path: PurePath, target: PurePath) -> None:
    """Move a checkpoint; the store copies the files."""
    for name in sorted(list_files(path), key=lambda name: name == MANIFEST):  # the seal last
        copy_file(path / name, target / name)
    delete(path)


def clean_up(directory: PurePath) -> None:
    """Finish or discard what killed runs have left unfinished."""
    for name, is_directory in list_directory(directory).items():
        # Only objects with a mark: a directory without one is whole, or was never ours.
        path = directory / name.removesuffix(INCOMING).removesuffix(OUTGOING)
        if is_directory or path.name == name:
            continue
        if name.endswith(OUTGOING) or read_manifest(path) is None:
            _remove_objects(path, list_files(path))
        remove_files([directory / name])


def _remove_objects(path: PurePath, names: Iterable[str]) -> None:
    """Remove the seals, then the other files of a checkpoint, of which some may be missing."""
    remove_files([path / MANIFEST])
    remove_files([path / COMMIT])
    remove_files(
        [path / name for name in names if name not in (MANIFEST, COMMIT) and OWN.fullmatch(name)]
    )


def list_sealed(directory: PurePath, checksums: bool) -> Files:
    """Write the files by which Orbax recognizes a complete checkpoint, and return the sizes and
    MD5s of all files.
    """
    # so that a listing with this one is not of an earlier save with the same name
    content = uuid.uuid4().hex.encode()
    digest = hashlib.md5(content, usedforsecurity=False).hexdigest()
    for name in (f"{STATE}/{COMMIT}", COMMIT):
        write_bytes(directory / name, content)
    for _ in range(_LAG):
        files = list_files(directory)
        if META in files and files.get(COMMIT, FileInfo(0, "")).md5 in (digest, None):
            return {
                name: (x.size, x.md5 and f"{MD5}{x.md5}")
                for name, x in files.items()
                if name != MANIFEST
            }
        time.sleep(1)
    raise StorageError(f"{directory}: the listing has no new files after {_LAG} s")


def validate_checkpoint(
    directory: PurePath,
    *,
    checksums: bool = False,
    share: tuple[int, int] = (0, 1),
    listing: Mapping[str, FileInfo] | None = None,
) -> str | None:
    """Return why `directory` is not a complete checkpoint, or None if it is one.

    The first of the processes in `share` compares the listing; the others have nothing to read.
    """
    if share[0] != 0:
        return None
    try:
        files = open_manifest(directory).files
        listing = listing or list_files(directory)
        for name, (size, digest) in files.items():
            info = listing.get(name)
            if info is None:  # the listing may be older than the object
                info = list_files((directory / name).parent).get(PurePath(name).name)
            if info is None:
                raise DamagedFileError(f"{name} is missing")
            if info.size != size:
                raise DamagedFileError(f"{name} must have {size} bytes, got {info.size}")
            # Only what was copied to the bucket has other checksums than those of the store
            if checksums and digest is not None and digest != f"{MD5}{info.md5}":
                check_file(directory / name, name, size, digest)
    except DamagedFileError as error:
        return str(error)
    return None
