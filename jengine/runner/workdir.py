"""The work directory of a run: its names, and what an earlier run left there."""

import datetime
import os
import shutil


def make_timestamp() -> str:
    """The local time as `20250131_235959`: the name of a run's log directory."""
    return datetime.datetime.now().strftime("%Y%m%d_%H%M%S")


def new_log_dir(work_dir: str, timestamp: str) -> tuple[str, str]:
    """The directory of a new run's logs, `<work_dir>/<timestamp>`, numbered if that is taken; and its timestamp."""
    name, number = timestamp, 1
    while os.path.exists(os.path.join(work_dir, name)):
        name, number = f"{timestamp}_{number}", number + 1
    return os.path.join(work_dir, name), name


def set_aside(work_dir: str) -> str | None:
    """Moves an earlier run's checkpoints out of the way of a run that starts anew, into `<work_dir>/earlier_<n>`.

    Returns:
      Where they lie now; None when there were none.
    """
    from jengine.checkpoint import list_checkpoints

    found = list_checkpoints(work_dir)
    if not found:
        return None
    number = 1
    while os.path.exists(target := os.path.join(work_dir, f"earlier_{number}")):
        number += 1
    os.makedirs(target)
    for path in found:
        shutil.move(path, os.path.join(target, os.path.basename(path)))
    pointer = os.path.join(work_dir, "last_checkpoint")
    if os.path.exists(pointer):
        os.remove(pointer)
    return target
