"""Manifest that seals a checkpoint: the size and a checksum of each file, all of it synced to disk.

With several processes, each hashes and syncs the files that it wrote, and lists them in one part of
the manifest, `manifest.3.json`; the manifest itself lists the parts and all other files.
Verification is shared in the same way.

Only damage that a second read confirms makes a checkpoint incomplete. A disk or a store that cannot
be read is a StorageError: the checkpoint may be whole.
"""

import functools
import hashlib
import os
import re
import stat
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any, NamedTuple, ParamSpec, TypeVar, cast

from jengine.checkpoint.progress import report_progress
from jengine.config.json_codec import decode, encode
from jengine.config.plugins import load_provided
from jengine.config.storage import (
    FileInfo,
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
_FIELDS = ("run", "latest", "iter", "files")  # as in `Manifest`
_READ_SIZE = 2**22  # bytes
MD5 = "md5:"  # before an MD5, in the place of a SHA-256
_PART = re.compile(r"manifest\.(\d+)\.json")
Files = Mapping[str, tuple[int, str | None]]
_P = ParamSpec("_P")
_T = TypeVar("_T")


class Manifest(NamedTuple):
    """Contents of a manifest."""

    run: str  # the identifier of the run that wrote it
    is_latest: bool  # whether a resumed run prefers it to others
    iteration: int | None  # None keeps it out of the search for a checkpoint to resume from
    # size in bytes and checksum (None without checksums) by name
    files: Files = types.MappingProxyType({})


class DamagedFileError(ValueError):
    """A file of a checkpoint is missing, or differs from its entry in the manifest."""


def at_urls(function: Callable[_P, _T]) -> Callable[_P, _T]:
    """Call the function of the same name in the extra for URLs, if the path is a URL."""

    @functools.wraps(function)
    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        if is_url(cast(PurePath, args[0])):
            provided: Callable[_P, _T] = load_provided("url_checkpoints", function.__name__)
            return provided(*args, **kwargs)
        return function(*args, **kwargs)

    return call


def seal(
    directory: PurePath, run: str, is_latest: bool, iteration: int | None, checksums: bool = True
) -> None:
    """Sync all files in `directory` to disk, then write the manifest.

    For `run`, `is_latest` and `iteration` see `Manifest`. Without `checksums` those of the arrays
    are left out.
    """
    manifest = Manifest(run, is_latest, iteration, list_sealed(directory, checksums))
    _write(directory, manifest)
    sync(directory)


@at_urls
def list_sealed(directory: PurePath, checksums: bool) -> Files:
    """Sync all files to disk, and return those that the manifest lists.

    Without `checksums` those of the arrays are left out.
    """
    names = list_files(directory).keys() - {MANIFEST}
    parts = [_read_part(directory / name) for name in names if _PART.fullmatch(name)]
    files = _sync_files(directory, names.difference(*parts), checksums)
    # directories too, which hold the names
    for path in [directory / STATE, *Path(directory / STATE).glob("*/")]:
        sync(path)
    return files


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


def open_manifest(directory: PurePath) -> Manifest:
    """Return the manifest in `directory`.

    Raises:
      DamagedFileError: there is none, or a damaged one, at a second read too.
    """
    path = directory / MANIFEST
    try:
        try:
            return _parse(read_bytes(path))
        except ValueError:
            return _parse(read_bytes(path))
    except (FileNotFoundError, NotADirectoryError):
        reason = "is missing"
    except (OSError, ValueError) as error:
        reason = f"is damaged ({error})"
    raise DamagedFileError(f"{MANIFEST} {reason}")


def read_manifest(directory: PurePath) -> Manifest | None:
    """Return the manifest in `directory`; None if there is none, or a damaged one."""
    try:
        return open_manifest(directory)
    except DamagedFileError:
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


@at_urls
def validate_checkpoint(
    directory: PurePath,
    *,
    checksums: bool = False,
    share: tuple[int, int] = (0, 1),
    listing: Mapping[str, FileInfo] | None = None,
) -> str | None:
    """Return the reason why `directory` is not a complete checkpoint, or None if it is one.

    Args:
      directory: any path.
      checksums: whether to compare checksums too.
      share: (index, count) for processes that verify the checkpoint together: each reads the
        manifest and a share of the files, whichever number of processes wrote them.
      listing: the files at a URL, if they have been listed.
    """
    index, count = share
    try:
        manifest = open_manifest(directory)
        files = dict(manifest.files)
        # The file list of a save on many processes is itself divided, a part for each
        for name in filter(_PART.fullmatch, manifest.files):
            check_file(directory / name, name, *files[name])
            files |= _read_part(directory / name)
        # by size, so all have about as much to read
        names = sorted(files, key=lambda name: (-files[name][0], name))
        for name in names[index::count]:
            size, digest = files[name]
            check_file(directory / name, name, size, digest if checksums else None)
    except DamagedFileError as error:
        return str(error)
    return None


def confirm(find_problem: Callable[[], str | None]) -> str | None:
    """Return the problem that a check finds twice.

    None if it does not: one read of other bytes proves no damage.
    """
    return find_problem() and find_problem()


def check_file(path: PurePath, name: str, size: int, digest: str | None) -> None:
    """Raise DamagedFileError for what `find_damage` finds twice."""
    if (problem := confirm(lambda: find_damage(path, name, size, digest))) is not None:
        raise DamagedFileError(problem)


def find_damage(path: PurePath, name: str, size: int, digest: str | None) -> str | None:
    """Return the reason why the bytes of a file are not those that the manifest names `name`, or
    None if they are.
    """
    if is_url(path):
        return _check_content(name, read_bytes(path), size, digest)
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
        if digest is not None and retry_read(path, lambda: _hash_file(path, digest)) != digest:
            return f"{name} is damaged (its checksum is not that of the manifest)"
    except OSError:
        return f"{name} is missing"
    return None


def _check_content(name: str, content: bytes, size: int, digest: str | None) -> str | None:
    """Return the reason why `content` is not what the manifest says of the file `name`, or None
    if it is.
    """
    if len(content) != size:
        return f"{name} must have {size} bytes, got {len(content)}"
    if digest is not None and _hash([content], digest) != digest:
        return f"{name} is damaged (its checksum is not that of the manifest)"
    return None


def _sync_files(
    directory: PurePath, names: Iterable[str], checksums: bool
) -> dict[str, tuple[int, str | None]]:
    """Sync files to disk and return sizes and SHA-256 by name."""
    files = {}
    for name in sorted(names):
        path = directory / name
        sync(path)
        has_digest = checksums or not name.startswith(f"{STATE}/")
        files[name] = (os.stat(path).st_size, _hash_file(path) if has_digest else None)
    return files


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
    for _ in range(2):
        # In one call: at a URL the files are fetched side by side, and each round trip costs more
        # than the bytes.
        found = read_many(paths.values()) if contents is None else contents
        problems = [
            _check_content(name, found[str(path)], *manifest.files[name])
            if str(path) in found
            else f"{name} is missing"
            for name, path in paths.items()
        ]
        if not any(problems):
            return {name: found[str(path)] for name, path in paths.items()}
        contents = None
    raise DamagedFileError(next(filter(None, problems)))


def _parse(content: bytes) -> Manifest:
    stored = decode(content)
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        found = stored.get("format") if isinstance(stored, dict) else stored
        raise ValueError(f"its format must be {_FORMAT}, got {found!r}")
    # First of all: fields of a damaged manifest mean nothing.
    if stored.pop("sha256", None) != _digest(stored):
        raise ValueError("its SHA-256 is not that of its content")
    if not stored.pop("complete", True):  # as earlier versions marked a save in progress
        raise ValueError("its save was never finished")
    try:
        run, latest, iteration = (stored[name] for name in _FIELDS[:-1])
    except KeyError as error:
        raise ValueError(f"it has another structure: {error!r}") from error
    return Manifest(run, latest, iteration, _parse_files(stored))


def _read_part(path: PurePath) -> Files:
    """Return the files in one part of the manifest."""
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
    content = {"format": _FORMAT, "complete": True, **dict(zip(_FIELDS, manifest, strict=True))}
    write_bytes(
        directory / MANIFEST, encode({**content, "sha256": _digest(content)}, indent=1).encode()
    )


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(content, sort_keys=True).encode()).hexdigest()


def _hash(chunks: Iterable[bytes], like: str = "") -> str:
    """Return a checksum of the same kind as `like`: an MD5 or a SHA-256."""
    is_md5 = like.startswith(MD5)
    checksum = hashlib.md5(usedforsecurity=False) if is_md5 else hashlib.sha256()
    for chunk in chunks:
        checksum.update(chunk)
        report_progress()  # the others wait for as long as this works
    return f"{MD5 if is_md5 else ''}{checksum.hexdigest()}"


def _hash_file(path: PurePath, like: str = "") -> str:
    with Path(path).open("rb", buffering=0) as file:  # the reads are large already
        return _hash(iter(lambda: file.read(_READ_SIZE), b""), like)
