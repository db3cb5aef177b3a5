"""Manifest that seals a checkpoint: the size and a checksum of each file, all of it synced to disk.

With several processes, each hashes and syncs the files that it wrote, and lists them in one part of
the manifest, `manifest.3.json`; the manifest itself lists the parts and all other files.
Verification is shared in the same way. Object storage tells the size and the MD5 of each object in
a listing: nothing is read to seal or to verify it.

A directory belongs to jengine only if it has a manifest. A save claims a directory with an
incomplete manifest before anything else is written, so an interrupted save is recognized, and user
directories are never touched.

Only damage that a second read confirms makes a checkpoint incomplete. A disk or a store that cannot
be read is a StorageError: the checkpoint may be whole.
"""

import functools
import hashlib
import os
import re
import shutil
import stat
import time
import types
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple

from jengine.checkpoint.progress import report_progress
from jengine.config.json_codec import decode, encode
from jengine.config.storage import (
    FileInfo,
    StorageError,
    exists,
    is_url,
    list_files,
    read_bytes,
    read_many,
    retry_read,
    sync,
    write_bytes,
)

MANIFEST = "manifest.json"
META = "meta.json"
BLOBS = "states.bin"
STATE = "state"
COMMIT = "commit_success.txt"  # by which Orbax recognizes a complete checkpoint on object storage
_FORMAT = 2
_FIELDS = ("run", "complete", "latest", "iter", "files")  # as in `Manifest`
_READ_SIZE = 2**22  # bytes
_MD5 = "md5:"  # before an MD5, in the place of a SHA-256
_LAG = 60  # seconds that a listing may take to show a new object
_PART = re.compile(r"manifest\.(\d+)\.json")
Files = Mapping[str, tuple[int, str | None]]


class Manifest(NamedTuple):
    """Contents of a manifest."""

    run: str  # the identifier of the run that wrote it
    is_complete: bool = False  # whether all files were written
    is_latest: bool = False  # whether a resumed run prefers it to others
    iteration: int | None = None  # None keeps it out of the search for a checkpoint to resume from
    # size in bytes and checksum (None without checksums) by name
    files: Files = types.MappingProxyType({})


def claim(directory: PurePath, run: str) -> None:
    """Create a local `directory` with an incomplete manifest.

    Remove what an interrupted save left there.

    Raises:
      FileExistsError: it has files and no manifest.
    """
    remove(directory)  # of an interrupted save
    os.makedirs(directory, exist_ok=True)
    _write(directory, Manifest(run))


def seal(
    directory: PurePath, *, run: str, is_latest: bool, iteration: int | None, checksums: bool = True
) -> None:
    """Sync all files in `directory` to disk, then complete the manifest.

    For the arguments, see `Manifest`.
    """
    if is_url(directory):
        files = _commit_objects(directory)
    else:
        names = list_files(directory).keys() - {MANIFEST}
        parts = [_read_part(directory / name) for name in names if _PART.fullmatch(name)]
        files = _sync_files(directory, names.difference(*parts), checksums)
        # directories too, which hold the names
        for path in [directory / STATE, *Path(directory / STATE).glob("*/")]:
            sync(path)
    _write(directory, Manifest(run, True, is_latest, iteration, files))
    sync(directory)


def seal_part(directory: PurePath, process: int, *, checksums: bool = True) -> None:
    """Sync the files that a process wrote to disk, and write its part of the manifest.

    Call it before `seal`.
    """
    if is_url(directory):  # `seal` lists the objects of all processes
        return
    # where Orbax writes the files of this process
    own = Path(directory / STATE / f"ocdbt.process_{process}")
    files = _sync_files(
        directory, [str((own / name).relative_to(directory)) for name in list_files(own)], checksums
    )
    for path in own.rglob("*/"):
        sync(path)
    write_bytes(directory / f"manifest.{process}.json", encode({"files": files}).encode())


def _commit_objects(directory: PurePath) -> Files:
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
                name: (x.size, x.md5 and f"{_MD5}{x.md5}")
                for name, x in files.items()
                if name != MANIFEST
            }
        time.sleep(1)
    raise StorageError(f"{directory}: the listing has no new files after {_LAG} s")


def read_manifest(directory: PurePath) -> Manifest | None:
    """Return the manifest in `directory`; None if there is none, or a damaged one."""
    try:
        return _read(directory)
    except (OSError, ValueError):
        return None


def read_manifests(directories: Iterable[PurePath]) -> dict[PurePath, Manifest | None]:
    """Return the manifests in those directories that have one, many at a time.

    None for a damaged one.
    """
    paths = {str(directory / MANIFEST): directory for directory in directories}
    manifests: dict[PurePath, Manifest | None] = {}
    # All at once: a work dir at a URL may have a thousand checkpoints, and one request after the
    # other takes a minute.
    for path, content in read_many(paths).items():
        try:
            manifests[paths[path]] = _parse(content)
        except ValueError:
            manifests[paths[path]] = read_manifest(paths[path])
    return manifests


def has_manifest(directory: PurePath) -> bool:
    """Return whether a local `directory` was made by jengine: it has a manifest.

    False for a symbolic link.
    """
    return not os.path.islink(directory) and os.path.isfile(directory / MANIFEST)


def validate_checkpoint(
    directory: PurePath, *, checksums: bool = False, share: tuple[int, int] = (0, 1)
) -> str | None:
    """Return the reason why `directory` is not a complete checkpoint, or None if it is one.

    Args:
      directory: any path.
      checksums: whether to compare checksums, and the iterations in manifest and meta.
      share: (index, count) for processes that verify the checkpoint together: each reads the
        manifest and a share of the files, whichever number of processes wrote them; on object
        storage the first one has nothing to read.
    """
    # The sizes come from one listing of the store, which process 0 makes for all.
    if is_url(directory) and share[0] != 0:
        return None
    manifest, problem = read_complete(directory)
    if problem is not None:
        return problem
    if is_url(directory):
        problem = validate_objects(directory, manifest, list_files(directory), checksums)
        return problem or (_validate_meta(directory, manifest) if checksums else None)
    for files in _list_share(directory, manifest.files, *share):
        if (problem := _validate_files(directory, files, checksums)) is not None:
            return problem
    return _validate_meta(directory, manifest) if checksums and share[0] == 0 else None


def find_incomplete(directory: PurePath) -> str | None:
    """Return the reason why `directory` is not a complete checkpoint by its manifest alone, or
    None if it is one.
    """
    return read_complete(directory)[1]


def read_complete(directory: PurePath) -> tuple[Manifest, str | None]:
    """Return the manifest, and the reason why the checkpoint is not complete; None if it is."""
    manifest = Manifest("")
    try:
        manifest = _read(directory)
    except (FileNotFoundError, NotADirectoryError):
        return manifest, f"{MANIFEST} is missing" if exists(directory) else "it does not exist"
    except (OSError, ValueError) as error:
        return manifest, f"{MANIFEST} is damaged ({error})"
    return manifest, None if manifest.is_complete else "its save was never finished"


def _read(directory: PurePath) -> Manifest:
    """Return the manifest.

    Raise FileNotFoundError, or ValueError if it is damaged at a second read too.
    """
    try:
        return _parse(read_bytes(directory / MANIFEST))
    except ValueError:
        return _parse(read_bytes(directory / MANIFEST))


def confirm(find_problem: Callable[[], str | None]) -> str | None:
    """Return the problem that a check finds twice.

    None if it does not: one read of other bytes proves no damage.
    """
    return find_problem() and find_problem()


def _list_share(directory: PurePath, files: Files, index: int, count: int) -> Iterator[Files]:
    """Yield the files that one process verifies: a share of those in the manifest, then of those in
    some parts.

    With more processes than parts, several divide the files in each part, after they have all
    verified the part itself.
    """
    # The file list of a save on many processes is itself divided, a part for each: hashing is
    # shared in the same way.
    parts = sorted(name for name in files if _PART.fullmatch(name))
    yield _select(
        {name: record for name, record in files.items() if name not in parts}, index, count
    )
    for name in parts[index % len(parts) :: count] if parts else ():
        yield {name: files[name]}
        members = range(index % len(parts), count, len(parts))
        yield _select(_read_part(directory / name), members.index(index), len(members))


def _select(files: Files, index: int, count: int) -> Files:
    """Return the share of one process, by size, so all have about as much to read."""
    names = sorted(files, key=lambda name: (-files[name][0], name))
    return {name: files[name] for name in names[index::count]}


def is_bare(directory: PurePath) -> bool:
    """Return whether a local directory has nothing but the manifest that a killed process was
    writing, or nothing.
    """
    if os.path.islink(directory) or not os.path.isdir(directory):
        return False
    return all(name == f"{MANIFEST}.new" for name in os.listdir(directory))


def remove(directory: PurePath) -> None:
    """Remove a local directory that has a manifest, the manifest last, so an interrupted removal is
    recognized.

    Raises:
      FileExistsError: it has files and no manifest.
    """
    if not os.path.exists(directory):
        return
    if is_bare(directory):
        shutil.rmtree(directory)
        return
    if not has_manifest(directory):
        raise FileExistsError(
            f"{directory} is not removed: it is not a checkpoint (it has no {MANIFEST})"
        )
    for path in Path(directory).iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MANIFEST:
            path.unlink()
    os.unlink(directory / MANIFEST)
    os.rmdir(directory)


def validate_objects(
    directory: PurePath, manifest: Manifest, found: Mapping[str, FileInfo], checksums: bool = False
) -> str | None:
    """Return the reason why the objects of a listing are not those of the manifest, or None if
    they are.
    """
    for name, (size, digest) in manifest.files.items():
        info = found.get(name)
        if info is None:  # the listing may be older than the object
            info = list_files((directory / name).parent).get(PurePath(name).name)
        if info is None:
            return f"{name} is missing"
        if info.size != size:
            return f"{name} must have {size} bytes, got {info.size}"
        if not checksums or digest is None:
            continue
        # Only what was copied to the bucket has other checksums than those of the store
        if digest.startswith(_MD5) and info.md5:
            problem = None if digest == f"{_MD5}{info.md5}" else _describe_damage(name, digest)
        else:
            problem = confirm(functools.partial(find_damage, directory / name, name, size, digest))
        if problem is not None:
            return problem
    return None


def find_damage(path: PurePath, name: str, size: int, digest: str | None) -> str | None:
    """Return the reason why the bytes of a file are not those that the manifest names `name`, or
    None if they are.
    """
    if is_url(path):
        return check_content(name, read_bytes(path), size, digest)
    try:
        status = retry_read(path, lambda: os.stat(path))
        # A link or a pipe with the right size could show other bytes at the next read, or block it.
        if not stat.S_ISREG(status.st_mode):
            return f"{name} must be a file"
        root = os.path.realpath(str(path).removesuffix(name))
        # a checkpoint is data: it shows no files from elsewhere
        if os.path.realpath(path) != os.path.join(root, name):
            return f"{name} must be a file in the checkpoint, got a link"
        if status.st_size != size:
            return f"{name} must have {size} bytes, got {status.st_size}"
        if digest is not None and retry_read(path, lambda: _hash_as(digest, path)) != digest:
            return _describe_damage(name, digest)
    except OSError:
        return f"{name} is missing"
    return None


def check_content(name: str, content: bytes, size: int, digest: str | None) -> str | None:
    """Return the reason why `content` is not what the manifest says of the file `name`, or None
    if it is.
    """
    if len(content) != size:
        return f"{name} must have {size} bytes, got {len(content)}"
    if digest is None:
        return None
    checksum = _new_hash(digest)
    checksum.update(content)
    return None if digest == _format_hash(digest, checksum) else _describe_damage(name, digest)


def _validate_files(directory: PurePath, files: Files, checksums: bool) -> str | None:
    for name, (size, digest) in files.items():
        expected = digest if checksums or _PART.fullmatch(name) else None
        if problem := confirm(
            functools.partial(find_damage, directory / name, name, size, expected)
        ):
            return problem
    return None


def _sync_files(
    directory: PurePath, names: Iterable[str], checksums: bool
) -> dict[str, tuple[int, str | None]]:
    """Sync files to disk and return sizes and SHA-256 by name."""
    files = {}
    for name in sorted(names):
        path = directory / name
        sync(path)
        has_digest = checksums or _PART.fullmatch(name)
        files[name] = (os.stat(path).st_size, _hash_as("", path) if has_digest else None)
    return files


def _validate_meta(directory: PurePath, manifest: Manifest) -> str | None:
    try:
        meta = decode(read_files(directory, manifest, [META])[META])
        if manifest.iteration is None:  # a published copy, which may have left out the iteration
            return None
        iteration = meta["meta"]["iter"]
    except DamagedFileError as error:
        return str(error)
    except (ValueError, KeyError, TypeError) as error:
        return f"{META} is unreadable ({error!r})"
    if iteration != manifest.iteration:
        return f"{META} must be of iteration {manifest.iteration}, got {iteration}"
    return None


class DamagedFileError(ValueError):
    """Error of a file of a checkpoint that is missing, or not what the manifest says."""


def read_files(
    directory: PurePath,
    manifest: Manifest,
    names: Sequence[str],
    contents: Mapping[str, bytes] | None = None,
) -> dict[str, bytes]:
    """Return the bytes of small files, those that the manifest lists, compared with its hashes.

    Args:
      directory: the checkpoint.
      manifest: its manifest.
      names: the files.
      contents: by path, if they have been read.

    Raises:
      DamagedFileError: a file is missing or has other bytes, at a second read too.
    """
    paths = {name: directory / name for name in names if name in manifest.files}

    def find_problems(contents: Mapping[str, bytes]) -> list[str]:
        problems = (
            check_content(name, contents[str(path)], *manifest.files[name])
            if str(path) in contents
            else f"{name} is missing"
            for name, path in paths.items()
        )
        return list(filter(None, problems))

    # In one call: at a URL the files are fetched side by side, and each round trip costs more than
    # the bytes.
    contents = read_many(paths.values()) if contents is None else contents
    if find_problems(contents):
        contents = read_many(paths.values())
    if problems := find_problems(contents):
        raise DamagedFileError(problems[0])
    return {name: contents[str(path)] for name, path in paths.items()}


def _parse(content: bytes) -> Manifest:
    stored = decode(content)
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        found = stored.get("format") if isinstance(stored, dict) else stored
        raise ValueError(f"its format must be {_FORMAT}, got {found!r}")
    # First of all: fields of a damaged manifest mean nothing.
    if stored.pop("sha256", None) != _digest(stored):
        raise ValueError("its SHA-256 is not that of its content")
    try:
        run, complete, latest, iteration = (stored[name] for name in _FIELDS[:-1])
    except KeyError as error:
        raise ValueError(f"it has another structure: {error!r}") from error
    return Manifest(run, complete, latest, iteration, _parse_files(stored))


def _read_part(path: PurePath) -> Files:
    """Return the files in one part of the manifest; raise ValueError if it is not readable."""
    return _parse_files(decode(read_bytes(path)))


def _parse_files(stored: Any) -> Files:
    try:
        files = {str(name): (int(size), digest) for name, (size, digest) in stored["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it has another structure: {error!r}") from error
    for name in files:
        # A checkpoint is data from elsewhere: its manifest must not make a reader open other files.
        if PurePath(name).is_absolute() or ".." in PurePath(name).parts:
            raise ValueError(f"files must be inside the checkpoint, got {name!r}")
    return files


def _write(directory: PurePath, manifest: Manifest) -> None:
    content = {"format": _FORMAT, **dict(zip(_FIELDS, manifest, strict=True))}
    write_bytes(
        directory / MANIFEST, encode({**content, "sha256": _digest(content)}, indent=1).encode()
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(content, sort_keys=True).encode()).hexdigest()


def _describe_damage(name: str, digest: str) -> str:
    return (
        f"{name} is damaged (its {'MD5' if digest.startswith(_MD5) else 'SHA-256'} is not that of "
        "the manifest)"
    )


def _new_hash(digest: str) -> Any:
    return hashlib.md5(usedforsecurity=False) if digest.startswith(_MD5) else hashlib.sha256()


def _format_hash(digest: str, checksum: Any) -> str:
    return f"{_MD5 if digest.startswith(_MD5) else ''}{checksum.hexdigest()}"


def _hash_as(digest: str, path: PurePath) -> str:
    """Return the checksum of a local file, of the same kind as `digest`: an MD5 or a SHA-256."""
    checksum = _new_hash(digest)
    with Path(path).open("rb", buffering=0) as file:  # the reads are large already
        while data := file.read(_READ_SIZE):
            checksum.update(data)
            report_progress()  # the others wait for as long as this works
    return _format_hash(digest, checksum)
