"""What to do after a run that failed on a full disk."""

import errno
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any

from jengine.checkpoint.checkpointer import CheckpointSaveError
from jengine.checkpoint.layout import find_manifests


def explain_full_disk(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return how to continue if an error, or its cause, is about a full disk or quota.

    Explainer. TensorStore has an error of its own.
    """
    cause: BaseException | None = error
    while cause is not None:
        is_own = isinstance(cause, OSError) and cause.errno in (errno.ENOSPC, errno.EDQUOT)
        if is_own or "No space left on device" in str(cause):
            break
        cause = cause.__cause__ or cause.__context__
    if cause is None:
        return None
    path = error.path if isinstance(error, CheckpointSaveError) else None
    earlier = ["CHECKPOINT"] if path is None else _list_others(path)
    if not earlier:
        return (
            "the disk is full. Free space, or write to another disk with --work-dir DIR, and start "
            "again: nothing is saved yet."
        )
    text = (
        "the disk is full. Free space, then continue from the last checkpoint with --resume; or "
        f"elsewhere with --resume {earlier[-1]} --work-dir DIR."
    )
    # The new checkpoint is written before an old one is removed, so only fewer than now make room
    if len(earlier) > 1:
        text += f" `CheckpointHook.max_keep_ckpts` of {len(earlier) - 1} keeps fewer checkpoints."
    return text


def _list_others(path: PurePath) -> list[str]:
    """Return the other checkpoints in the directory of `path`, oldest first."""
    others = [
        (manifest.iteration or 0, str(found))
        for found, manifest in find_manifests(path.parent).items()
        if manifest is not None and found.name != path.name
    ]
    return [found for _, found in sorted(others)]
