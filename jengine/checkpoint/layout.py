"""Checkpoint files: where they are, how a checkpoint is found, and whether it is complete.

    work_dir/
      current_run           the run that trains here; checkpoints of other runs are not resumed from
      last_checkpoint       the newest regular checkpoint, as a path relative to the work dir
      epoch_5/
        state/              the arrays, in Orbax's format
        meta.json           everything else: `meta` (iter, epoch, seed, config), schedules, hook
          states, message hub
        states.bin          large arrays in the states of hooks and of the data, if there are any
        manifest.json       completed last: the size and SHA-256 of every other file
        manifest.3.json     with several processes: the same for the files that process 3 wrote

A directory with a checkpoint's name is complete whenever the process is killed, see
`jengine.checkpoint.commit`, and the manifest reveals files that were lost or damaged later. On
object storage there are also files `commit_success.txt`, by which Orbax recognizes complete
checkpoints.
"""

import hashlib
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import PurePath
from typing import Any

from etils import epath

from jengine.checkpoint.commit import INCOMING, OUTGOING
from jengine.checkpoint.manifest import (
    BLOBS,
    MANIFEST,
    META,
    STATE,
    Manifest,
    open_manifest,
    read_files,
    read_manifest,
    read_manifests,
    validate_checkpoint,
)
from jengine.checkpoint.progress import wait_for_processes
from jengine.config.errors import did_you_mean
from jengine.config.json_codec import decode_object, encode, pack, unpack
from jengine.config.storage import (
    StorageError,
    is_url,
    list_directory,
    make_pointer,
    read_bytes,
    resolve_pointer,
    storage_path,
    write_bytes,
)
from jengine.parallel.processes import ProcessGroup, SingleProcess

POINTER = "last_checkpoint"
EARLIER = "earlier_"  # and a number: a directory with the checkpoints of another run
CURRENT_RUN = "current_run"
_UNREADABLE = "lost+found"  # in the root of a file system, for the superuser alone
_STATES = ("hooks", "data")  # entries that may have arrays and bytes

_LOGGER = logging.getLogger("jengine")


class CorruptCheckpointError(ValueError):
    """Error of a checkpoint with a missing or truncated file."""


ALONE = SingleProcess()


def read_pointer(work_dir: PurePath) -> tuple[PurePath | None, str | None]:
    """Return the path in `last_checkpoint`, None if there is none, and what is wrong with the
    file.
    """
    try:
        text = read_bytes(work_dir / POINTER).decode().strip("\r\n")
        return (resolve_pointer(work_dir, text), None) if text else (None, "it is empty")
    except (FileNotFoundError, NotADirectoryError):  # the normal case before the first save
        return None, None
    except (OSError, ValueError) as error:
        return None, f"it is no text: {error}"


def list_locations(work_dir: PurePath) -> list[PurePath]:
    """Return the directories with the checkpoints of a work dir: itself, and the `out_dir` of a
    CheckpointHook that `last_checkpoint` points to.
    """
    target, _ = read_pointer(work_dir)
    return list(dict.fromkeys([work_dir, work_dir if target is None else target.parent]))


def write_pointer(work_dir: PurePath, path: PurePath) -> None:
    """Point `last_checkpoint` to `path`, atomically, and flush it to disk."""
    _write_text(work_dir / POINTER, make_pointer(work_dir, path))


def read_current_run(work_dir: PurePath) -> str | None:
    """Return the identifier of the run that trains in `work_dir`.

    None if no run has written it, or it is damaged.
    """
    path = work_dir / CURRENT_RUN
    for _ in range(2):  # one read of other bytes proves no damage
        try:
            run, _, checksum = read_bytes(path).decode().strip().partition(" ")
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError):
            continue
        # Earlier versions wrote the identifier alone
        if (checksum and checksum == _checksum(run)) or re.fullmatch(
            "[0-9a-f]{32}", run + checksum
        ):
            return run or None
    _LOGGER.warning("skipped %s: it is damaged", path)
    return None


def write_current_run(work_dir: PurePath, run: str) -> None:
    """Set the run that trains in `work_dir`, atomically: from now on, others are not resumed
    from.
    """
    _write_text(work_dir / CURRENT_RUN, f"{run} {_checksum(run)}")


def _checksum(run: str) -> str:
    return hashlib.sha256(run.encode()).hexdigest()[:8]


def _write_text(path: PurePath, text: str) -> None:
    if not is_url(path):
        os.makedirs(path.parent, exist_ok=True)
    write_bytes(path, text.encode())


def find_latest(
    work_dir: str | os.PathLike[str], *, checksums: bool = False, processes: ProcessGroup = ALONE
) -> str | None:
    """Return the newest complete checkpoint in a work dir as an absolute path.

    None if there is none.

    This is the `last_checkpoint` target if it is complete. Otherwise it is the checkpoint with the
    most iterations in the work dir or next to that target; regular ones come before best ones. A
    warning is logged for each that is damaged, and skipped. Checkpoints count only if the run that
    trains in the work dir wrote them.

    Args:
      work_dir: the run's directory; it may be missing.
      checksums: whether to skip checkpoints whose files do not match the checksums.
      processes: those that look for it together: the first one finds it, and each verifies a share
        of the files.

    Raises:
      CorruptCheckpointError: there are checkpoints, and all are damaged. StorageError: one cannot
        be read, whole or not.
    """
    root = storage_path("work_dir", work_dir)
    problems: dict[PurePath, str] = {}
    # One process lists: a network file system may show others an older state
    candidates = _iter_candidates(root) if processes.index == 0 else iter(())
    while True:
        path, problem = processes.all_gather(
            "the checkpoint to resume from", next(candidates, (None, None))
        )[0]
        if path is None:
            break
        if problem is None and (problem := _verify(path, checksums, processes)) is None:
            return str(path)
        problems[path] = problem
        _LOGGER.warning("skipped checkpoint %s: %s", path, problem)
    if problems:
        found = ", ".join(f"{path.name} ({problem})" for path, problem in problems.items())
        raise CorruptCheckpointError(
            f"{root} has checkpoints, but none can be read: {found}; to start without them, move "
            f"them to another directory, with {POINTER}"
        )
    return None


def _iter_candidates(root: PurePath) -> Iterator[tuple[PurePath, str | None]]:
    """Yield the checkpoints that a run in `root` may resume from, the best first, and why some are
    damaged.

    They are judged by the manifests alone.
    """
    run = read_current_run(root)
    target, pointer_problem = read_pointer(root)
    pointed = None if target is None else read_manifest(target)
    is_own = pointed is not None and run in (None, pointed.run)
    if target is not None and is_own:
        yield target, None  # before anything is listed: a bucket may have a thousand checkpoints
    listed = find_manifests(root)
    if target is not None and target.parent != root:  # the `out_dir` of a CheckpointHook
        listed |= find_manifests(target.parent)
    candidates = []
    for path, manifest in listed.items():
        if manifest is None:
            if path.suffix != INCOMING:  # an unfinished save is no news
                yield path, validate_checkpoint(path) or f"{MANIFEST} has other bytes at each read"
        elif (
            manifest.iteration is not None
            and run in (None, manifest.run)
            and not (is_own and path == target)
        ):
            age = 0 if is_url(path) else os.stat(path).st_mtime_ns
            candidates.append((manifest.is_latest, manifest.iteration, age, path))
    # A run has saved here: without its checkpoints it does not start from scratch in silence.
    if pointer_problem is not None:
        yield root / POINTER, pointer_problem
    if target is not None and pointed is None and target not in listed:
        yield target, validate_checkpoint(target)
    # Regular ones first, then by iteration
    yield from ((path, None) for *_, path in sorted(candidates, reverse=True))


def _verify(path: PurePath, checksums: bool, processes: ProcessGroup) -> str | None:
    """Return why a checkpoint is damaged, on all processes, whichever of them has found it.

    None if it is whole.

    Raises:
      StorageError: on all processes, if one cannot read it.
    """
    problem = None
    failure = None
    try:
        problem = validate_checkpoint(
            path, checksums=checksums, share=(processes.index, processes.count)
        )
    except (OSError, ValueError) as error:  # not a path at all
        problem = str(error)
    except StorageError as error:
        failure = str(error)
    if processes.count > 1:
        wait_for_processes("verification")  # may take longer than devices wait for each other
    found = processes.all_gather("the verification of a checkpoint", (problem, failure))
    if failures := [failure for _, failure in found if failure is not None]:
        raise StorageError(failures[0])
    return next((problem for problem, _ in found if problem is not None), None)


def list_checkpoints(directory: str | os.PathLike[str]) -> list[str]:
    """Return the absolute paths of all checkpoints directly in `directory`, by name, including
    incomplete ones.
    """
    return sorted(map(str, find_manifests(storage_path("directory", directory))))


def find_manifests(directory: PurePath) -> dict[PurePath, Manifest | None]:
    """Return all checkpoints directly in `directory`, each with the manifest.

    None if that is missing or unreadable.

    On object storage what has no manifest is no checkpoint.
    """
    paths = [
        directory / name for name, is_directory in list_directory(directory).items() if is_directory
    ]
    if is_url(directory):
        return read_manifests(paths)
    # A checkpoint on its way out was replaced or evicted
    paths = [path for path in paths if path.suffix != OUTGOING and path.name != _UNREADABLE]
    paths = [path for path in paths if _is_checkpoint(list_directory(path))]
    return {**dict.fromkeys(paths), **read_manifests(paths)}


def find_checkpoint(
    path: str | os.PathLike[str], *, checksums: bool = False, processes: ProcessGroup = ALONE
) -> str:
    """Return the absolute path of a checkpoint, given the checkpoint or a work dir for its newest
    one.

    Args:
      path: a checkpoint or a work dir.
      checksums: whether to verify the file checksums.
      processes: those that verify it together, each a share of the files.

    Raises:
      FileNotFoundError: there is no checkpoint; the message lists what is there.
      CorruptCheckpointError: the checkpoint is incomplete or damaged.
    """
    root = storage_path("path", path)
    entries = list_directory(root)
    if read_manifest(root) is not None or _is_checkpoint(entries):
        if (problem := _verify(root, checksums, processes)) is not None:
            raise CorruptCheckpointError(f"checkpoint {root} is corrupt: {problem}")
        return str(root)
    if (latest := find_latest(root, checksums=checksums, processes=processes)) is not None:
        return latest
    incoming = root.with_name(root.name + INCOMING)
    if not entries and read_manifest(incoming) is not None:  # killed while it was replaced
        return find_checkpoint(incoming, checksums=checksums, processes=processes)
    place = root if entries else root.parent
    names = sorted(entries or list_directory(place))
    what = "does not exist"
    if entries or root.exists():
        what = (
            f"is neither a checkpoint ({STATE}/, {META}, {MANIFEST}) nor a work dir with complete "
            "checkpoints"
        )
    elif saved := [os.path.basename(each) for each in list_checkpoints(place)]:
        names = saved
    more = f" and {len(names) - 12} more" if len(names) > 12 else ""
    raise FileNotFoundError(
        f"{root} {what}; {place} has {', '.join(names[:12]) or 'no files'}{more}"
        f"{did_you_mean(root.name, names)}"
    )


def open_checkpoint(path: str | os.PathLike[str]) -> tuple[epath.Path, Manifest]:
    """Return the absolute path and the manifest of the checkpoint that `find_checkpoint` finds.

    A manifest alone decides whether a checkpoint that has one is complete.
    """
    root = storage_path("path", path)
    if (manifest := read_manifest(root)) is not None:
        return root, manifest
    found = storage_path("path", find_checkpoint(root))
    return found, open_manifest(found)


def read_meta(path: str | os.PathLike[str], states: bool = False) -> dict[str, Any]:
    """Read everything but the arrays from a checkpoint: `meta`, schedules, hook states, message
    hub.

    With `states` also the large arrays in the states of hooks and data, for which there are dicts
    otherwise.

    Raises:
      FileNotFoundError, CorruptCheckpointError: as `find_checkpoint`.
    """
    directory, manifest = open_checkpoint(path)
    try:
        contents = read_files(directory, manifest, [META, BLOBS] if states else [META])
        meta = decode_object(contents[META])
        if not all(isinstance(meta.get(name, {}), dict) for name in ("meta", "hooks")):
            raise ValueError("`meta` and `hooks` must be JSON objects")
        blobs = contents.get(BLOBS, b"") if states else None
        return meta | {key: unpack(meta[key], blobs) for key in _STATES if key in meta}
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CorruptCheckpointError(
            f"checkpoint {directory} is corrupt: {META} is unreadable ({error})"
        ) from error


def encode_meta(meta: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the files with `meta` by name: JSON with one line per entry, and the bytes of large
    arrays in the states of hooks and data.

    Raises:
      TypeError: a value that JSON cannot represent; the message has the dotted path.

    >>> print(encode_meta({"meta": {"iter": 7}, "ids": (1, 2)})["meta.json"].decode())
    {
     "meta": {"iter": 7},
     "ids": [1, 2]
    }
    """
    blobs = bytearray()
    packed = dict(meta)
    if "data" in meta:
        packed["data"] = pack(meta["data"], "checkpoint.data", blobs)
    if "hooks" in meta:  # a hook of the user's may return anything
        packed["hooks"] = {
            name: pack(x, f"{name}.state_dict()", blobs) for name, x in meta["hooks"].items()
        }
    # With `indent`, Python would not use its encoder in C.
    lines = [f" {encode(key)}: {encode(x, f'checkpoint.{key}')}" for key, x in packed.items()]
    text = "{\n" + ",\n".join(lines) + "\n}"
    return {META: text.encode(), **({BLOBS: bytes(blobs)} if blobs else {})}


def _is_checkpoint(entries: Mapping[str, bool]) -> bool:
    # damaged ones count: they are reported
    return MANIFEST in entries or (META in entries and STATE in entries)
