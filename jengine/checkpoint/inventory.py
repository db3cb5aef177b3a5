"""List the checkpoints of a run with the reason for each, and remove some by hand."""

import dataclasses
import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jengine.checkpoint.checkpointer import Checkpointer
from jengine.checkpoint.layout import (
    INCOMING,
    MANIFEST,
    META,
    POINTER,
    decode_meta,
    find_latest,
    list_checkpoints,
    read_pointer,
    validate_checkpoint,
    write_pointer,
)
from jengine.checkpoint.lock import is_locked
from jengine.errors import closest


@dataclasses.dataclass(frozen=True)
class CheckpointEntry:
    """Describe one checkpoint of a run.

    Attributes:
      path: its directory.
      size: bytes on disk.
      fault: the reason why it is corrupt; None if it is not.
      latest: whether a resumed run would start from it.
      reason: the reason for keeping it, from the newest checkpoint of the run; empty if unknown.
      meta: its `meta` entry (iter, epoch, time, …); empty if it has none.
      metrics: those of the validation at its iteration.
    """

    path: str
    size: int
    fault: str | None
    latest: bool
    reason: str
    meta: Mapping[str, Any]
    metrics: Mapping[str, float]

    @property
    def name(self) -> str:
        """The name of its directory."""
        return os.path.basename(self.path)


def read_inventory(work_dir: str | os.PathLike[str]) -> list[CheckpointEntry]:
    """Return every checkpoint of a run, corrupt ones too, sorted by iteration, then by name.

    Args:
      work_dir: the run's directory. If it has none itself, those next to the one that `last_checkpoint` names.

    Raises:
      FileNotFoundError: there is no such directory.
    """
    root = Path(work_dir).absolute()
    if not root.is_dir():
        raise FileNotFoundError(f"there is no work dir {root}")
    pointer = read_pointer(root)
    found = list_checkpoints(root) or ([] if pointer is None else list_checkpoints(pointer.parent))
    paths = [Path(path) for path in found]
    faults = {path: validate_checkpoint(path) for path in paths}
    rests = {path: decode_meta((path / META).read_text()) for path in paths if faults[path] is None}
    # By name: `last_checkpoint` of a work dir that was copied, or is reached by a link, has another path for it.
    latest = Path(find_latest(root) or "").name if rests else ""
    reasons, metrics = _reasons(rests), _metrics(rests)
    entries = []
    for path in paths:
        meta = rests.get(path, {}).get("meta", {})
        entries.append(
            CheckpointEntry(
                path=str(path),
                size=sum(file.stat().st_size for file in path.rglob("*") if file.is_file()),
                fault=faults[path],
                latest=path.name == latest,
                reason="" if path not in rests else reasons.get(path.name) or _other_reason(path, path.name == latest),
                meta=meta,
                metrics=metrics.get(meta.get("iter"), {}),
            )
        )
    return sorted(entries, key=lambda entry: (entry.meta.get("iter", -1), entry.name))


def remove(work_dir: str | os.PathLike[str], names: Iterable[str], *, force: bool = False) -> list[CheckpointEntry]:
    """Remove checkpoints of a run.

    Args:
      work_dir: the run's directory.
      names: of the checkpoints.
      force: whether to allow the latest too; `last_checkpoint` then names the newest one left.

    Returns:
      The removed checkpoints.

    Raises:
      FileNotFoundError: a name without a checkpoint in the run. ValueError: the latest, without `force`; or one that
        is being saved. Nothing was removed.
    """
    root = Path(work_dir).absolute()
    by_name = {entry.name: entry for entry in read_inventory(root)}
    doomed = []
    for name in dict.fromkeys(names):
        if name not in by_name:
            raise FileNotFoundError(f"{root} has no checkpoint {name!r}{closest(name, by_name)}")
        entry = by_name[name]
        if entry.latest and not force:
            raise ValueError(f"{name} is the latest checkpoint, from which the run would resume; force removes it too")
        if name.endswith(INCOMING) and is_locked(root):
            raise ValueError(f"{name} is being saved by the run that is training in {root}")
        doomed.append(entry)
    checkpointer = Checkpointer(root)
    pointer = read_pointer(root)
    for entry in doomed:
        checkpointer.delete(entry.path)
    if pointer is not None and pointer.name in {entry.name for entry in doomed}:
        _repoint(root, Path(doomed[0].path).parent)
    return doomed


def _repoint(root: Path, directory: Path) -> None:
    """Point `last_checkpoint` to the newest one left in `directory`; remove it if there is none."""
    (root / POINTER).unlink()
    latest = find_latest(directory)
    if latest is not None:
        write_pointer(root, latest)


def _reasons(rests: Mapping[Path, Mapping[str, Any]]) -> dict[str, str]:
    """Return reasons by name, from the newest checkpoint: each stores why those of its time were kept."""
    said = {path: rest for path, rest in rests.items() if _keepers(rest)}
    if not said:
        return {}
    newest = max(said, key=lambda path: (said[path].get("meta", {}).get("time", ""), _sealed_at(path)))
    return {name: why for hook in _keepers(said[newest]) for name, why in hook["reasons"].items()}


def _metrics(rests: Mapping[Path, Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return metrics by iteration: of validations stored in checkpoints, and the scores of best ones."""
    metrics: dict[int, dict[str, float]] = {}
    for path, rest in rests.items():
        for _, iteration, values in rest.get("validations", []):
            metrics.setdefault(iteration, {}).update(values)
        iteration = rest.get("meta", {}).get("iter")
        for hook in _keepers(rest):
            for key, best in hook["best"].items():
                scores = ((key, entry["score"]) for entry in best if entry["name"] == path.name)
                metrics.setdefault(iteration, {}).update(scores)
    return metrics


def _keepers(rest: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the states of the CheckpointHooks; a run may have several under different names."""
    hooks = rest.get("hooks", {}).values()
    return [state for state in hooks if isinstance(state, Mapping) and "reasons" in state]


def _sealed_at(path: Path) -> int:
    return (path / MANIFEST).stat().st_mtime_ns


def _other_reason(path: Path, latest: bool) -> str:
    if json.loads((path / MANIFEST).read_text())["iter"] is None:
        return "published"
    return "the latest" if latest else ""
