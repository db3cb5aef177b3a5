"""Manifest that seals a checkpoint: the size and SHA-256 of each file, all of it synced to disk.

With several processes, each hashes and syncs the files that it wrote, and lists them in one part of the manifest,
`manifest.3.json`; the manifest itself lists the parts and all other files. Verification is shared in the same way.

A directory belongs to jengine only if it has a manifest. A save claims a directory with an incomplete manifest before
anything else is written, so an interrupted save is recognized, and user directories are never touched.
"""

import hashlib
import os
import re
import shutil
import stat
import types
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from jengine.checkpoint.progress import report_progress
from jengine.json_codec import decode, encode

MANIFEST = "manifest.json"
META = "meta.json"
BLOBS = "states.bin"
STATE = "state"
_FORMAT = 2
_FIELDS = ("run", "complete", "latest", "iter", "files")  # as in `Manifest`
_READ_SIZE = 2**22  # bytes
_PART = re.compile(r"manifest\.(\d+)\.json")
Files = Mapping[str, tuple[int, str | None]]


class Manifest(NamedTuple):
    """Contents of a manifest."""

    run: str  # the identifier of the run that wrote it
    is_complete: bool = False  # whether all files were written
    is_latest: bool = False  # whether a resumed run prefers it to others
    iteration: int | None = None  # None keeps it out of the search for a checkpoint to resume from
    files: Files = types.MappingProxyType({})  # size in bytes and SHA-256 (None without checksums) by name


def claim(directory: Path, run: str) -> None:
    """Create `directory` with an incomplete manifest; remove what an interrupted save left there.

    Raises:
      FileExistsError: it has files and no manifest.
    """
    remove(directory)  # of an interrupted save
    directory.mkdir(exist_ok=True)
    _write(directory, Manifest(run))


def seal(directory: Path, *, run: str, is_latest: bool, iteration: int | None, checksums: bool = True) -> None:
    """Sync all files in `directory` to disk, then complete the manifest; for the arguments, see `Manifest`."""
    listed = [name for path in directory.glob("manifest.*.json") for name in _read_part(path)]
    names = set(map(str, (path.relative_to(directory) for path in _files(directory)))) - set(listed)
    files = _sync_files(directory, names, checksums)
    for path in [directory / STATE, *(directory / STATE).glob("*/")]:  # directories too, which hold the names
        sync(path)
    _write(directory, Manifest(run, True, is_latest, iteration, files))
    sync(directory)


def seal_part(directory: Path, process: int, *, checksums: bool = True) -> None:
    """Sync the files that a process wrote to disk, and write its part of the manifest; call it before `seal`."""
    own = directory / STATE / f"ocdbt.process_{process}"  # where Orbax writes the files of this process
    files = _sync_files(directory, [str(path.relative_to(directory)) for path in _files(own)], checksums)
    for path in own.rglob("*/"):
        sync(path)
    write_synced(directory / f"manifest.{process}.json", encode({"files": files}))


def read_manifest(directory: Path) -> Manifest | None:
    """Return the manifest in `directory`; None if there is none, or an unreadable one."""
    try:
        return _read(directory)
    except (OSError, ValueError):
        return None


def has_manifest(directory: Path) -> bool:
    """Return whether `directory` was made by jengine: it has a manifest; False for a symbolic link."""
    return not directory.is_symlink() and (directory / MANIFEST).is_file()


def validate_checkpoint(directory: Path, *, checksums: bool = False, share: tuple[int, int] = (0, 1)) -> str | None:
    """Return the reason why `directory` is not a complete checkpoint, or None if it is one.

    Args:
      directory: any path.
      checksums: whether to compare SHA-256 hashes, and the iterations in manifest and meta.
      share: (index, count) for processes that verify the checkpoint together: each reads the manifest and a share of
        the files, whichever number of processes wrote them.
    """
    manifest, problem = _read_complete(directory)
    if problem is not None:
        return problem
    for files in _list_share(directory, manifest.files, *share):
        if (problem := _validate_files(directory, files, checksums)) is not None:
            return problem
    return _validate_meta(directory, manifest) if checksums and share[0] == 0 else None


def find_incomplete(directory: Path) -> str | None:
    """Return the reason why `directory` is not a complete checkpoint by its manifest alone, or None if it is one."""
    return _read_complete(directory)[1]


def _read_complete(directory: Path) -> tuple[Manifest, str | None]:
    """Return the manifest, and the reason why the checkpoint is not complete; None if it is."""
    manifest = Manifest("")
    if not directory.exists():
        return manifest, "it does not exist"
    try:
        manifest = _read(directory)
    except (FileNotFoundError, NotADirectoryError):
        return manifest, f"{MANIFEST} is missing"
    except (OSError, ValueError) as error:
        return manifest, f"{MANIFEST} is unreadable ({error})"
    return manifest, None if manifest.is_complete else "its save was never finished"


def _list_share(directory: Path, files: Files, index: int, count: int) -> Iterator[Files]:
    """Yield the files that one process verifies: a share of those in the manifest, then of those in some parts.

    With more processes than parts, several divide the files in each part, after they have all verified the part itself.
    """
    parts = sorted(name for name in files if _PART.fullmatch(name))
    yield _select({name: record for name, record in files.items() if name not in parts}, index, count)
    for name in parts[index % len(parts) :: count] if parts else ():
        yield {name: files[name]}
        members = range(index % len(parts), count, len(parts))
        yield _select(_read_part(directory / name), members.index(index), len(members))


def _select(files: Files, index: int, count: int) -> Files:
    """Return the share of one process, by size, so all have about as much to read."""
    names = sorted(files, key=lambda name: (-files[name][0], name))
    return {name: files[name] for name in names[index::count]}


def remove(directory: Path) -> None:
    """Remove a directory that has a manifest, the manifest last, so an interrupted removal is recognized.

    Raises:
      FileExistsError: it has files and no manifest.
    """
    if not directory.exists():
        return
    if directory.is_dir() and all(path.name == f"{MANIFEST}.new" for path in directory.iterdir()):
        return  # a process was killed before it wrote the manifest, or after it removed it
    if not has_manifest(directory):
        raise FileExistsError(f"{directory} is not removed: it is not a checkpoint (it has no {MANIFEST})")
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != MANIFEST:
            path.unlink()
    (directory / MANIFEST).unlink()
    directory.rmdir()


def _validate_files(directory: Path, files: Files, checksums: bool) -> str | None:
    for name, (size, digest) in files.items():
        path = directory / name
        try:
            status = path.stat()
        except (FileNotFoundError, NotADirectoryError):
            return f"{name} is missing"
        if not stat.S_ISREG(status.st_mode):
            return f"{name} must be a file"
        if (actual := status.st_size) != size:
            return f"{name} must have {size} bytes, got {actual}"
        if (checksums or _PART.fullmatch(name)) and digest is not None and _sha256(path) != digest:
            return f"{name} is damaged (its SHA-256 is not that of the manifest)"
    return None


def _sync_files(directory: Path, names: Iterable[str], checksums: bool) -> dict[str, tuple[int, str | None]]:
    """Sync files to disk and return sizes and SHA-256 by name."""
    files = {}
    for name in sorted(names):
        path = directory / name
        sync(path)
        has_digest = checksums or _PART.fullmatch(name)
        files[name] = (path.stat().st_size, _sha256(path) if has_digest else None)
    return files


def sync(path: Path) -> None:
    """Flush a file or a directory to disk, on file systems that support it."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError:
        if not path.is_dir():  # some network file systems cannot sync directories
            raise
    finally:
        os.close(descriptor)


def write_synced(path: Path, text: str) -> None:
    """Replace the file at `path` atomically, and flush it and its directory to disk."""
    temporary = path.with_name(f"{path.name}.new")
    temporary.write_text(text)
    sync(temporary)  # before the rename, or a power failure could leave an empty file
    temporary.replace(path)
    sync(path.parent)  # the rename itself


def _validate_meta(directory: Path, manifest: Manifest) -> str | None:
    try:
        meta = decode((directory / META).read_text())
        if manifest.iteration is None:  # a published copy, which may have left out the iteration
            return None
        iteration = meta["meta"]["iter"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        return f"{META} is unreadable ({error!r})"
    if iteration != manifest.iteration:
        return f"{META} must be of iteration {manifest.iteration}, got {iteration}"
    return None


def _read(directory: Path) -> Manifest:
    stored = decode((directory / MANIFEST).read_text())
    if not isinstance(stored, dict) or stored.get("format") != _FORMAT:
        found = stored.get("format") if isinstance(stored, dict) else stored
        raise ValueError(f"its format must be {_FORMAT}, got {found!r}")
    if stored.pop("sha256", None) != _digest(stored):
        raise ValueError("its SHA-256 is not that of its content")
    files = _parse_files(stored)
    try:
        run, complete, latest, iteration = (stored[name] for name in _FIELDS[:-1])
    except KeyError as error:
        raise ValueError(f"it has another structure: {error!r}") from error
    return Manifest(run, complete, latest, iteration, files)


def _read_part(path: Path) -> Files:
    """Return the files in one part of the manifest; raise ValueError if it is not readable."""
    return _parse_files(decode(path.read_text()))


def _parse_files(stored: Any) -> Files:
    try:
        files = {str(name): (int(size), digest) for name, (size, digest) in stored["files"].items()}
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"it has another structure: {error!r}") from error
    for name in files:
        if Path(name).is_absolute() or ".." in Path(name).parts:
            raise ValueError(f"files must be inside the checkpoint, got {name!r}")
    return files


def _write(directory: Path, manifest: Manifest) -> None:
    content = {"format": _FORMAT, **dict(zip(_FIELDS, manifest, strict=True))}
    write_synced(directory / MANIFEST, encode({**content, "sha256": _digest(content)}, indent=1))


def _digest(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(encode(content, sort_keys=True).encode()).hexdigest()


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    with path.open("rb", buffering=0) as file:  # the reads are large already
        while data := file.read(_READ_SIZE):
            digest.update(data)
            report_progress()  # the others wait for as long as this works
    return digest.hexdigest()


def _files(directory: Path) -> Iterator[Path]:
    return (path for path in sorted(directory.rglob("*")) if path.is_file() and path.name != MANIFEST)
