"""Copies of the newest state on a local disk of each host, from which a restart continues if they
are newer.

    <directory>/<run>-<hash of the work dir>/
      process_0_of_2/iter_150/    a checkpoint with the arrays that the devices of this process hold
      process_0_of_2/iter_140/    kept until all processes have the next

The work dir has the file `local_copies` with the path of the directory, so that a restart looks
there. A copy of the work dir has the same run, but not the same copies on local disks.
"""

import hashlib
import logging
import os
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoint.layout import (
    find_latest,
    find_manifests,
    read_current_run,
    read_line,
    read_meta,
)
from jengine.checkpoint.manifest import read_manifest, validate_checkpoint
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.config.storage import is_url, storage_path, write_bytes
from jengine.parallel.processes import ProcessGroup

POINTER = "local_copies"

_LOGGER = logging.getLogger("jengine")


def copies_path(
    directory: str | os.PathLike[str],
    work_dir: str | os.PathLike[str],
    run: str,
    processes: ProcessGroup,
) -> Path:
    """Return where this process has its copies.

    >>> from jengine.parallel.processes import SingleProcess
    >>> copies_path("/local", "gs://bucket/run", "3f2a", SingleProcess()).as_posix()
    '/local/3f2a-e69e696c/process_0_of_1'
    """
    place = os.fspath(work_dir) if is_url(work_dir) else os.path.realpath(work_dir)
    name = f"{run}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    return Path(directory) / name / f"process_{processes.index}_of_{processes.count}"


def announce_copies(work_dir: str | os.PathLike[str], directory: str) -> None:
    """Tell a restart in `work_dir` where copies are; one process calls this."""
    write_bytes(storage_path("work_dir", work_dir) / POINTER, directory.encode())


def find_newer_copy(
    work_dir: str | os.PathLike[str], newest: str | None, processes: ProcessGroup
) -> tuple[str, str] | None:
    """Return this process's copy of the newest state that all processes have whole, and a line for
    the log; None if `newest` is not older.

    Args:
      work_dir: the run's directory or URL.
      newest: the newest checkpoint in it; None without one.
      processes: all processes, which call this together.
    """
    known = ("", "", -1)  # directory, run, iteration
    # One process reads the shared directory; the others would only repeat the requests, and could
    # see another state.
    if processes.index == 0:
        manifest = None if newest is None else read_manifest(storage_path("resume", newest))
        iteration = -1 if manifest is None or manifest.iteration is None else manifest.iteration
        root = storage_path("work_dir", work_dir)
        known = (read_line(root / POINTER), read_current_run(root) or "", iteration)
    directory, run, iteration = processes.broadcast("the directory of local copies", known)
    if not directory or not run:
        return None
    copies = _find_whole(copies_path(directory, work_dir, run, processes), newer_than=iteration)
    found = processes.all_gather("the local copies", sorted(copies))
    # Only an iteration that every process has can be restored; a machine that was replaced has
    # none.
    common = set(found[0]).intersection(*found)
    if common:
        note = f"The copies on local disks are newer than {newest or 'any checkpoint'}."
        return copies[max(common)], note
    if any(found):
        missing = ", ".join(
            str(process) for process, iterations in enumerate(found) if not iterations
        )
        _LOGGER.warning(
            f"The copies on local disks in {directory} are not used, although some are newer than "
            "the checkpoint: "
            f"{f'process {missing} has none' if missing else 'the processes have others'}."
        )
    return None


def describe_layout(state: Any) -> str:
    """Return a hash of which shards the devices of this process hold.

    "" for a single process, which holds all.
    """
    if jax.process_count() == 1:
        return ""
    lines = []
    for path, leaf in flatten(state).items():
        # By the slices that this process holds, not by device numbers, which differ after a
        # restart.
        indices = leaf.sharding.addressable_devices_indices_map(leaf.shape).values()
        lines.append(f"{path} {leaf.shape} {sorted(set(map(str, indices)))}")
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def replace_unfit_copy(
    work_dir: str | os.PathLike[str], path: str, state: Any, processes: ProcessGroup
) -> str:
    """Return the newest checkpoint in the work dir if `path` is a copy with other shards than
    `state`, else `path`.

    Raises:
      ConfigError: there is no checkpoint.
    """
    own = read_meta(path)["meta"].get("layout")
    # Decided together: one process that takes another checkpoint would train from other weights.
    if all(
        processes.all_gather(
            "the layout of the local copies", own in (None, describe_layout(state))
        )
    ):
        return path
    newest = find_latest(work_dir, checksums=True, processes=processes)
    if newest is None:
        raise ConfigError(
            f"`parallel` must be that of the local copies, because {work_dir} has no checkpoint, "
            f"got another: {path} has other shards than the devices of this process"
        )
    _LOGGER.warning(
        f"The local copies have other shards than this run: it continues from {newest}."
    )
    return newest


def _find_whole(directory: Path, newer_than: int) -> dict[int, str]:
    """Return the complete copies by iteration, with all files verified."""
    found = {}
    for path, manifest in find_manifests(storage_path("directory", directory)).items():
        if manifest is None or manifest.iteration is None:
            continue  # the process was killed while it wrote it
        if manifest.iteration > newer_than:
            if (problem := validate_checkpoint(path, checksums=True)) is None:
                found[manifest.iteration] = str(path)
            else:
                _LOGGER.warning(f"skipped the local copy {path}: {problem}")
    return found
