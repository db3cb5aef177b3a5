"""The best checkpoints of a run, as the CheckpointHook has ranked them."""

import contextlib
import os
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any, NamedTuple

from jengine.checkpoint.identity import TIMESTAMP
from jengine.checkpoint.layout import (
    CorruptCheckpointError,
    find_checkpoint,
    find_manifests,
    list_locations,
    read_current_run,
    read_meta,
)
from jengine.checkpoint.manifest import Manifest
from jengine.config.annotations import is_mapping
from jengine.config.errors import ConfigError, closest
from jengine.config.json_codec import decode_object
from jengine.config.storage import read_bytes, storage_path
from jengine.config.work_dir import VERDICT
from jengine.hooks.checkpoint import CheckpointHook
from jengine.hooks.hook import Hook


class BestCheckpoint(NamedTuple):
    """The best checkpoint of a run by a metric."""

    path: str
    score: float
    iteration: int | None  # None if the checkpoint is damaged


def list_best_checkpoints(work_dir: str | os.PathLike[str]) -> dict[str, BestCheckpoint]:
    """Return the best checkpoint by each metric of `save_best`, of the run that trains here.

    Every checkpoint has the rankings at its save. Those of the newest iteration count, unless
    followers have evaluated later, and in each the first checkpoint that is still there.

    Args:
      work_dir: directory or URL; the directory of `last_checkpoint` is searched too.
    """
    root = storage_path("work_dir", work_dir)
    run = read_current_run(root)
    found: dict[PurePath, Manifest | None] = {}
    for directory in list_locations(root):
        found |= find_manifests(directory)
    iterations = {
        path: manifest.iteration
        for path, manifest in found.items()
        if manifest and manifest.iteration is not None and run in (None, manifest.run)
    }
    newest = max(iterations.values(), default=0)
    rankings: dict[str, Sequence[Mapping[str, Any]]] = {}
    for path in (path for path, iteration in iterations.items() if iteration == newest):
        for metric, entries in _read_rankings(path).items():
            # a best checkpoint is newer than the regular one of its iteration
            if metric not in rankings or any(entry["name"] == path.name for entry in entries):
                rankings[metric] = entries
        rankings |= _read_verdict(root, path)
    # damaged ones too: whoever loads them gets the error
    paths = {path.name: path for path in found}
    best = {}
    for metric, entries in rankings.items():
        for entry in (entry for entry in entries if entry["name"] in paths):
            path = paths[entry["name"]]
            best[metric] = BestCheckpoint(str(path), entry["score"], iterations.get(path))
            break
    return best


def find_best_checkpoint(work_dir: str | os.PathLike[str], metric: str | bool = True) -> str:
    """Return the path of the best checkpoint of a run.

    Args:
      work_dir: see `list_best_checkpoints`.
      metric: a metric of `save_best`; True if there is only one.

    Raises:
      FileNotFoundError: there is none. ConfigError: none by this metric, or several metrics.
    """
    best = list_best_checkpoints(work_dir)
    if not best:
        root = storage_path("work_dir", work_dir)
        if find_checkpoint(root) == str(root):  # an error if nothing is there
            raise ConfigError(f"the best checkpoint is in a work dir, got the checkpoint {root}")
        raise FileNotFoundError(
            f"{root} must have a best checkpoint, as `save_best` of the CheckpointHook makes it "
            "after a validation, got none"
        )
    name = next(iter(best)) if metric is True and len(best) == 1 else metric
    if name not in best:
        none = f"none of {', '.join(best)}"
        given = none if metric is True else f"{metric!r}{closest(str(metric), best)}"
        raise ConfigError(
            f"the best checkpoint in {work_dir} must be by a metric of save_best, got {given}"
        )
    return best[str(name)].path


def describe_best(path: str) -> str:
    """Return whether a checkpoint is the best of its run, or which one is; "" if none is."""
    tested = storage_path("path", path)
    texts = []
    for metric, best in list_best_checkpoints(tested.parent).items():
        if best.iteration == read_meta(tested)["meta"].get("iter"):
            texts.append(f"{tested.name} is the best by {metric} ({best.score:.4f})")
        else:
            name = os.path.basename(best.path)
            texts.append(f"the best by {metric} ({best.score:.4f}) is {name}: --best {metric}")
    return "; ".join(texts)


def check_load_best(hooks: Sequence[Hook], schedulers: object, sections: Mapping[str, Any]) -> None:
    """Raise ConfigError if `load_best_at_end` is no metric of `save_best`, or True for several."""
    loop = sections["train_cfg"]
    wanted = is_mapping(loop) and loop.get("load_best_at_end", False)
    saved = [hook for hook in hooks if isinstance(hook, CheckpointHook) and hook.saves_best]
    metrics = [metric for hook in saved for _, metric, _ in hook.monitored_metrics()]
    choices = [False, *metrics, *([True] if saved and len(metrics) < 2 else [])]
    if wanted not in choices:
        raise ConfigError(
            f"`train_cfg.load_best_at_end` must be {' or '.join(map(repr, choices))} with the "
            f"save_best of this run, got {wanted!r}"
        )


def _read_rankings(path: PurePath) -> dict[str, Any]:
    """Return the kept checkpoints by metric, the best first, as a checkpoint stores them."""
    rankings: dict[str, Any] = {}
    with contextlib.suppress(CorruptCheckpointError):  # the others have older ones
        for state in read_meta(path).get("hooks", {}).values():
            if isinstance(state, Mapping) and "reasons" in state:  # of a CheckpointHook
                rankings |= state["best"]
    return rankings


def _read_verdict(work_dir: PurePath, path: PurePath) -> dict[str, Any]:
    """Return the kept checkpoints by metric that followers have found in a checkpoint's run."""
    with contextlib.suppress(OSError, ValueError, KeyError):
        timestamp = str(read_meta(path)["meta"]["timestamp"])
        if TIMESTAMP.fullmatch(timestamp):  # it names a directory, and a checkpoint is data
            return dict(decode_object(read_bytes(work_dir / timestamp / VERDICT))["best"])
    return {}
