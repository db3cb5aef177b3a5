"""Checkpoint listing with the reason for keeping each, and removal by hand."""

import dataclasses
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from jengine.checkpoint import commit
from jengine.checkpoint.layout import (
    INCOMING,
    POINTER,
    CorruptCheckpointError,
    find_latest,
    find_manifests,
    read_pointer,
    write_pointer,
)
from jengine.checkpoint.lock import is_locked
from jengine.checkpoint.manifest import (
    MANIFEST,
    META,
    DamagedFileError,
    read_files,
    validate_checkpoint,
)
from jengine.config.errors import closest
from jengine.config.json_codec import decode_object
from jengine.config.storage import (
    FileInfo,
    is_url,
    list_files,
    read_many,
    remove_files,
    storage_path,
)
from jengine.extras.report.run_files import suggest_path


@dataclasses.dataclass(frozen=True)
class CheckpointEntry:
    """One checkpoint in a run's work dir."""

    path: str
    size: int  # bytes on disk
    problem: str | None  # why it is corrupt; None if it is complete
    latest: bool  # whether a resumed run would start from it
    reason: str  # for keeping it, as the newest checkpoint tells; empty if unknown
    meta: Mapping[str, Any]  # iter, epoch, time, …; may be empty
    metrics: Mapping[str, float]  # of the validation at this iteration

    @property
    def name(self) -> str:
        """Name of the directory."""
        return os.path.basename(self.path)


def list_checkpoint_entries(work_dir: str | os.PathLike[str]) -> list[CheckpointEntry]:
    """Return all checkpoints, including corrupt ones, sorted by iteration, then by name.

    Args:
      work_dir: the run's directory; if it has no checkpoints, those next to the `last_checkpoint`
        target are listed.

    Raises:
      FileNotFoundError: the directory does not exist.
    """
    root = storage_path("work_dir", work_dir)
    if not root.is_dir():
        raise FileNotFoundError(f"there is no work dir {root}{suggest_path(root)}")
    pointer, _ = read_pointer(root)
    directory = root
    manifests = find_manifests(root)
    if not manifests and pointer is not None:
        directory = pointer.parent
        manifests = find_manifests(pointer.parent)
    files: dict[PurePath, dict[str, FileInfo]] = {path: {} for path in manifests}
    for name, info in list_files(directory).items() if manifests else ():  # one listing for all
        child, _, file = name.partition("/")
        files.get(directory / child, {})[file] = info
    problems = {
        path: validate_checkpoint(path, listing=files[path] if is_url(path) else None)
        for path in manifests
    }
    # all at once
    stored = read_many(path / META for path, problem in problems.items() if problem is None)
    metadata = {}
    for path, manifest in manifests.items():
        if problems[path] is None and manifest is not None:
            try:
                metadata[path] = _read_facts(path.name, read_files(path, manifest, [META], stored))
            except DamagedFileError as error:
                problems[path] = str(error)
            except (ValueError, TypeError, KeyError, AttributeError) as error:  # of a stranger
                problems[path] = f"{META} is unreadable ({error})"
    latest = os.path.basename(_find_latest(root) or "")
    reasons = _collect_reasons(metadata)
    metrics: dict[int, dict[str, float]] = {}
    for facts in metadata.values():
        # Each has the validations before it too: those of iterations whose checkpoints were removed
        # are in later ones.
        for iteration, values in facts.metrics:
            metrics.setdefault(iteration, {}).update(values)
    entries = []
    for path, manifest in manifests.items():
        meta = metadata[path].meta if path in metadata else {}
        is_latest = path.name == latest
        is_published = manifest is not None and manifest.iteration is None
        reason = reasons.get(path.name) or (
            "published" if is_published else "the latest" if is_latest else ""
        )
        entries.append(
            CheckpointEntry(
                path=str(path),
                size=sum(info.size for info in files[path].values()),
                problem=problems[path],
                latest=is_latest,
                reason=reason if path in metadata else "",
                meta=meta,
                metrics=metrics.get(meta.get("iter", -1), {}),
            )
        )
    return sorted(entries, key=lambda entry: (entry.meta.get("iter", -1), entry.name))


def remove_checkpoints(
    work_dir: str | os.PathLike[str], names: Iterable[str], *, force: bool = False
) -> list[CheckpointEntry]:
    """Remove checkpoints by name, and return them.

    Args:
      work_dir: the run's directory.
      names: the checkpoint names.
      force: whether to remove the latest too; `last_checkpoint` then points to the newest remaining
        one.

    Raises:
      FileNotFoundError: there is no such checkpoint. ValueError: the latest, without `force`; or
        one that is being saved. Nothing was removed.
    """
    root = storage_path("work_dir", work_dir)
    by_name = {entry.name: entry for entry in list_checkpoint_entries(root)}
    removed = []
    for name in dict.fromkeys(names):  # all are checked before one is removed
        if name not in by_name:
            raise FileNotFoundError(f"{root} has no checkpoint {name!r}{closest(name, by_name)}")
        entry = by_name[name]
        if entry.latest and not force:
            raise ValueError(
                f"{name} is the latest checkpoint, from which the run would resume; force removes "
                "it too"
            )
        if name.endswith(INCOMING) and is_locked(root):
            raise ValueError(f"{name} is being saved by the run that is training in {root}")
        removed.append(entry)
    pointer, _ = read_pointer(root)
    for entry in removed:
        commit.delete(storage_path("path", entry.path))
    if pointer is not None and pointer.name in {entry.name for entry in removed}:
        remove_files([root / POINTER])  # `find_latest` then looks for the newest that is left
        if (latest := _find_latest(storage_path("path", removed[0].path).parent)) is not None:
            write_pointer(root, storage_path("path", latest))
    return removed


def _find_latest(root: PurePath) -> str | None:
    try:
        return find_latest(root)
    except CorruptCheckpointError:  # all are damaged, as the list says
        return None


class _Facts(NamedTuple):
    """What the list tells of a checkpoint, from its metadata."""

    meta: Mapping[str, Any]
    reasons: Mapping[str, str]  # by checkpoint, at the time of the save
    has_reasons: bool
    metrics: Sequence[tuple[int, Mapping[str, float]]]  # by iteration


def _read_facts(name: str, files: Mapping[str, bytes]) -> _Facts:
    content = decode_object(files[META])
    meta = dict(content.get("meta", {}))
    # a run may have several CheckpointHooks, under different names
    hooks = content.get("hooks", {}).values()
    states = [state for state in hooks if isinstance(state, Mapping) and "reasons" in state]
    reasons = {name: reason for state in states for name, reason in state["reasons"].items()}
    metrics = [(iteration, dict(values)) for _, iteration, values in content.get("validations", [])]
    for state in states:
        for key, best in state["best"].items():
            scores = (entry["score"] for entry in best if entry["name"] == name)
            metrics += ((meta.get("iter", -1), {key: score}) for score in scores)
    return _Facts(meta, reasons, bool(states), metrics)


def _collect_reasons(metadata: Mapping[PurePath, _Facts]) -> Mapping[str, str]:
    """Return reasons by name, from the newest checkpoint: each stores the reasons at the time of
    its save.
    """

    def age(path: PurePath) -> tuple[str, int, int]:
        # The text has whole seconds, and a copy of the directory may have new file times
        meta = metadata[path].meta
        return (
            meta.get("time", ""),
            0 if is_url(path) else os.stat(path / MANIFEST).st_mtime_ns,
            meta.get("iter", 0),
        )

    newest = max((path for path in metadata if metadata[path].has_reasons), key=age, default=None)
    return {} if newest is None else metadata[newest].reasons
