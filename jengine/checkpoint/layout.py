"""Checkpoint files: where they are, how a checkpoint is found, and whether it is complete.

    work_dir/
      current_run           the run that trains here; checkpoints of other runs are not resumed from
      last_checkpoint       the path of the newest regular checkpoint, as text
      epoch_5/
        state/              the arrays, in Orbax's format
        meta.json           everything else: `meta` (iter, epoch, seed, config), schedules, hook states, message hub
        states.bin          large arrays in the states of hooks and of the data, if there are any
        manifest.json       completed last: the size and SHA-256 of every other file
        manifest.3.json     with several processes: the same for the files that process 3 wrote

A checkpoint is written to `epoch_5.incoming` and renamed once the manifest is complete. To remove it, it is renamed to
`epoch_5.outgoing` first. So a directory with a checkpoint's final name is complete whenever the process is killed, and
the manifest reveals files that were lost or damaged later.
"""

import logging
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from jengine.checkpoint import arrays
from jengine.checkpoint.manifest import (
    BLOBS,
    MANIFEST,
    META,
    STATE,
    find_incomplete,
    read_manifest,
    validate_checkpoint,
    write_synced,
)
from jengine.checkpoint.progress import wait_for_processes
from jengine.json_codec import decode, encode, pack, unpack
from jengine.storage import check_local_path

POINTER = "last_checkpoint"
CURRENT_RUN = "current_run"
INCOMING = ".incoming"
OUTGOING = ".outgoing"
_STATES = ("hooks", "data")  # entries that may have arrays and bytes

_LOGGER = logging.getLogger("jengine")


class CorruptCheckpointError(ValueError):
    """Error of a checkpoint with a missing or truncated file."""


class ProcessGroup(Protocol):
    """Processes that look for a checkpoint together; see `jengine.distributed.get_processes`."""

    index: int  # of this process
    count: int

    def all_gather(self, name: str, value: Any) -> list[Any]:
        """Return the values of all processes."""


class _SingleProcess:
    index, count = 0, 1

    def all_gather(self, name: str, value: Any) -> list[Any]:
        return [value]


ALONE = _SingleProcess()


def read_pointer(work_dir: Path) -> Path | None:
    """Return the path in `last_checkpoint`, whether it exists or not; None if the file is missing or not readable."""
    try:
        return Path((work_dir / POINTER).read_text().strip())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        _LOGGER.warning("skipped %s, which is unreadable: %s", work_dir / POINTER, error)
        return None


def write_pointer(work_dir: Path, path: str) -> None:
    """Point `last_checkpoint` to `path`, atomically, and flush it to disk."""
    work_dir.mkdir(parents=True, exist_ok=True)
    write_synced(work_dir / POINTER, path)


def read_current_run(work_dir: Path) -> str | None:
    """Return the identifier of the run that trains in `work_dir`; None if no run has written it."""
    try:
        return (work_dir / CURRENT_RUN).read_text().strip() or None
    except (OSError, ValueError):
        return None


def write_current_run(work_dir: Path, run: str) -> None:
    """Set the run that trains in `work_dir`, atomically: from now on, others are not resumed from."""
    write_synced(work_dir / CURRENT_RUN, run)


def find_latest(
    work_dir: str | os.PathLike[str], *, checksums: bool = False, processes: ProcessGroup = ALONE
) -> str | None:
    """Return the newest complete checkpoint in a work dir as an absolute path; None if there is none.

    This is the `last_checkpoint` target if it is complete. Otherwise it is the checkpoint with the most iterations in
    the work dir or next to that target; regular ones come before best ones. A warning is logged for each that is
    skipped. Checkpoints count only if the run that trains in the work dir wrote them.

    Args:
      work_dir: the run's directory; it may be missing.
      checksums: whether to skip checkpoints whose files do not match the checksums, or whose arrays are unreadable.
      processes: those that look for it together: the first one finds it, and each verifies a share of the files.
    """
    # One process lists: a network file system may show others an older state
    candidates = _iter_candidates(Path(check_local_path("work_dir", work_dir))) if processes.index == 0 else iter(())
    while (path := processes.all_gather("the checkpoint to resume from", next(candidates, None))[0]) is not None:
        if (problem := _verify(path, checksums, processes, readable=True)) is None:
            return str(path)
        _LOGGER.warning("skipped checkpoint %s: %s", path, problem)
    return None


def _iter_candidates(root: Path) -> Iterator[Path]:
    """Yield the checkpoints that a run in `root` may resume from, judged by the manifests, the best first."""
    directories = [root]
    run = read_current_run(root)
    if (target := read_pointer(root)) is not None:
        manifest = read_manifest(target)
        if run is None or manifest is None or manifest.run == run:  # without a manifest it is reported as incomplete
            yield target
        if target.parent != root:
            directories.append(target.parent)  # the `out_dir` of a CheckpointHook
    candidates = []
    for path in (path for directory in directories for path in _iter_checkpoints(directory) if path != target):
        manifest = read_manifest(path)
        if manifest is None or not manifest.is_complete:
            if path.suffix != INCOMING:  # an unfinished save is no news
                _LOGGER.warning("skipped checkpoint %s: %s", path, validate_checkpoint(path))
        elif manifest.iteration is not None and run in (None, manifest.run):
            candidates.append((manifest.is_latest, manifest.iteration, path.stat().st_mtime_ns, path))
    yield from (path for *_, path in sorted(candidates, reverse=True))  # regular ones first, then by iteration


def _verify(path: Path, checksums: bool, processes: ProcessGroup, readable: bool = False) -> str | None:
    """Return why a checkpoint is not complete, on all processes, whichever of them has found it; None if it is.

    With `readable` and `checksums`, Orbax must also be able to read the arrays' structure.
    """
    try:
        problem = validate_checkpoint(path, checksums=checksums, share=(processes.index, processes.count))
    except (OSError, ValueError) as error:  # not a path at all, or not readable
        problem = str(error)
    if problem is None and readable and checksums and processes.index == 0:
        try:
            arrays.read_structs(path / STATE)
        except Exception as error:  # of any type: from Orbax, from TensorStore, or from a file of another version
            problem = f"its arrays are unreadable ({type(error).__name__}: {error})"
    if processes.count > 1:
        wait_for_processes("verification")  # may take longer than devices wait for each other
    return next(filter(None, processes.all_gather(f"the verification of {path}", problem)), None)


def list_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """Return the absolute paths of all checkpoints directly in `directory`, by name, including incomplete ones."""
    return sorted(str(path) for path in _iter_checkpoints(Path(directory).absolute()))


def find_checkpoint(path: str | os.PathLike[str], *, checksums: bool = False, processes: ProcessGroup = ALONE) -> str:
    """Return the absolute path of a checkpoint, given the checkpoint or a work dir for its newest one.

    Args:
      path: a checkpoint or a work dir.
      checksums: whether to verify the file checksums.
      processes: those that verify it together, each a share of the files.

    Raises:
      FileNotFoundError: the path does not exist, or the directory has no checkpoint; the message lists the contents.
      CorruptCheckpointError: the checkpoint is incomplete or damaged.
    """
    return _locate(path, lambda found: _verify(found, checksums, processes), checksums, processes)


def locate_checkpoint(path: str | os.PathLike[str]) -> str:
    """Return the path as `find_checkpoint`, by the manifest alone: the other files are not looked at."""
    return _locate(path, find_incomplete)


def _locate(
    path: str | os.PathLike[str],
    verify: Callable[[Path], str | None],
    checksums: bool = False,
    processes: ProcessGroup = ALONE,
) -> str:
    path = Path(check_local_path("path", path))
    replacement = path.with_name(path.name + INCOMING)
    if not path.exists() and validate_checkpoint(replacement) is None:  # killed between the renames of a replacement
        return str(replacement)
    if not path.is_dir():
        if path.exists():
            raise FileNotFoundError(f"a checkpoint must be a directory with {STATE}/ and {META}, got the file {path}")
        raise FileNotFoundError(f"there is no checkpoint {path}; {_list_contents(path.parent)}")
    if _is_checkpoint(path):
        if (problem := verify(path)) is not None:
            raise CorruptCheckpointError(f"checkpoint {path} is corrupt: {problem}")
        return str(path)
    if (latest := find_latest(path, checksums=checksums, processes=processes)) is not None:
        return latest
    raise FileNotFoundError(
        f"{path} is neither a checkpoint ({STATE}/, {META}, {MANIFEST}) nor a work dir with complete checkpoints; "
        f"{_list_contents(path)}"
    )


def read_meta(path: str | os.PathLike[str], states: bool = False) -> dict[str, Any]:
    """Read everything but the arrays from a checkpoint: `meta`, schedules, hook states, message hub.

    With `states` also the large arrays in the states of hooks and data, for which there are dicts otherwise.

    Raises:
      FileNotFoundError, CorruptCheckpointError: as `find_checkpoint`.
    """
    directory = Path(locate_checkpoint(path))
    meta: dict[str, Any] = decode((directory / META).read_text())
    blobs = None if not states else (directory / BLOBS).read_bytes() if (directory / BLOBS).exists() else b""
    return meta | {key: unpack(meta[key], blobs) for key in _STATES if key in meta}


def pack_states(meta: Mapping[str, Any]) -> tuple[dict[str, Any], bytes]:
    """Return `meta` with the states of hooks and data as JSON, and the bytes of large arrays in them."""
    blobs = bytearray()
    packed = {key: pack(meta[key], f"checkpoint.{key}", blobs) for key in _STATES if key in meta}
    return {**meta, **packed}, bytes(blobs)


def write_meta(directory: Path, text: str, blobs: bytes) -> None:
    """Write what `encode_meta` and `pack_states` returned."""
    (directory / META).write_text(text)
    if blobs:
        (directory / BLOBS).write_bytes(blobs)


def encode_meta(meta: Mapping[str, Any]) -> str:
    """Return `meta` as JSON text with one line per entry.

    Raises:
      TypeError: a value that JSON cannot represent; the message has the dotted path.

    >>> print(encode_meta({"meta": {"iter": 7}, "ids": (1, 2)}))
    {
     "meta": {"iter": 7},
     "ids": [1, 2]
    }
    """
    # With `indent`, Python would not use its encoder in C.
    lines = [f" {encode(key)}: {encode(value, f'checkpoint.{key}')}" for key, value in meta.items()]
    return "{\n" + ",\n".join(lines) + "\n}"


def _is_checkpoint(path: Path) -> bool:
    return any((path / name).exists() for name in (MANIFEST, META, STATE))  # damaged ones count: they are reported


def _iter_checkpoints(directory: Path) -> Iterator[Path]:
    try:
        exists = directory.is_dir()
    except (OSError, ValueError):  # a name that is too long, or not a name at all
        return
    if exists:
        # A checkpoint on its way out was replaced or evicted
        yield from (p for p in directory.iterdir() if p.suffix != OUTGOING and p.is_dir() and _is_checkpoint(p))


def _list_contents(directory: Path) -> str:
    """Return what is in `directory`, as the end of an error message."""
    if not directory.is_dir():
        return f"the directory {directory} does not exist either"
    names = sorted(p.name + "/" * p.is_dir() for p in directory.iterdir())
    shown = ", ".join(names[:12]) + (f" and {len(names) - 12} more" if len(names) > 12 else "")
    return f"{directory} contains {shown}" if names else f"{directory} is empty"
