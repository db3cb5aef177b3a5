"""What checkpoints a run has, why each is there, and taking some away by hand."""

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
    find_latest,
    list_checkpoints,
    read_pointer,
    validate_checkpoint,
    write_pointer,
)
from jengine.checkpoint.lock import is_locked
from jengine.errors import closest


@dataclasses.dataclass(frozen=True)
class Entry:
    """One checkpoint of a run.

    Attributes:
      path: its directory.
      size: bytes on disk.
      fault: what keeps it from being whole; None when it is.
      latest: whether a resumed run would start from it.
      reason: why it is kept, as the run said in its newest checkpoint; empty where it said nothing.
      meta: its `meta` entry (iter, epoch, time, …); empty where there is none.
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


def take_inventory(work_dir: str | os.PathLike[str]) -> list[Entry]:
    """Every checkpoint of a run, torn ones too, in the order of their iterations, those of one by name.

    Args:
      work_dir: the run's directory. If it holds none itself, those beside the one that `last_checkpoint` names count.

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
    rests = {path: json.loads((path / META).read_text()) for path in paths if faults[path] is None}
    # By name: `last_checkpoint` of a work dir that was copied, or is reached by a link, has another path for it.
    latest = Path(find_latest(root) or "").name if rests else ""
    reasons, metrics = _reasons(rests), _metrics(rests)
    entries = []
    for path in paths:
        meta = rests.get(path, {}).get("meta", {})
        entries.append(
            Entry(
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


def remove(work_dir: str | os.PathLike[str], names: Iterable[str], *, force: bool = False) -> list[Entry]:
    """Removes checkpoints of a run.

    Args:
      work_dir: the run's directory.
      names: of the checkpoints.
      force: whether the latest may go too; `last_checkpoint` then names the newest one left.

    Returns:
      What was removed.

    Raises:
      FileNotFoundError: a name that is no checkpoint of the run. ValueError: the latest, without `force`; or one that
        is being saved. Nothing was removed.
    """
    root = Path(work_dir).absolute()
    by_name = {entry.name: entry for entry in take_inventory(root)}
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
        _point_anew(root, Path(doomed[0].path).parent)
    return doomed


def _point_anew(root: Path, directory: Path) -> None:
    """`last_checkpoint` names the newest that is left in `directory`; with none left, it goes."""
    (root / POINTER).unlink()
    latest = find_latest(directory)
    if latest is not None:
        write_pointer(root, latest)


def _reasons(rests: Mapping[Path, Mapping[str, Any]]) -> dict[str, str]:
    """By name, from what was saved last: each checkpoint says why those there were kept at that time."""
    said = {path: rest for path, rest in rests.items() if _keepers(rest)}
    if not said:
        return {}
    newest = max(said, key=lambda path: (said[path].get("meta", {}).get("time", ""), _sealed_at(path)))
    return {name: why for hook in _keepers(said[newest]) for name, why in hook["reasons"].items()}


def _metrics(rests: Mapping[Path, Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """By iteration: of the validations that checkpoints know of, and the scores that best ones were saved for."""
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
    """The states of the CheckpointHooks, of which a run may have several under names of their own."""
    hooks = rest.get("hooks", {}).values()
    return [state for state in hooks if isinstance(state, Mapping) and "reasons" in state]


def _sealed_at(path: Path) -> int:
    return (path / MANIFEST).stat().st_mtime_ns


def _other_reason(path: Path, latest: bool) -> str:
    if json.loads((path / MANIFEST).read_text())["iter"] is None:
        return "published"
    return "the latest" if latest else ""
