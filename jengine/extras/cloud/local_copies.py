"""Copies of the newest state on a local disk of each host, from which a restart continues if they
are newer.

    <directory>/<run>-<hash of the work dir>/
      process_0_of_2/iter_150/    a checkpoint with the arrays that the devices of process 0 hold
      process_0_of_2/iter_140/    kept until all processes have the next
      process_1_of_2/             the same of process 1, if this host keeps its copies too

The work dir has the file `local_copies` with the path of the directory, so that a restart looks
there. A copy of the work dir has the same run, but not the same copies on local disks.
"""

import hashlib
import logging
import math
import os
import re
from collections.abc import Mapping
from pathlib import Path, PurePath
from typing import Any, NamedTuple

import jax

from jengine.checkpoint.layout import (
    CorruptCheckpointError,
    find_latest,
    find_manifests,
    list_checkpoints,
    read_current_run,
    read_meta,
)
from jengine.checkpoint.manifest import read_manifest, validate_checkpoint
from jengine.checkpoint.progress import wait_for_processes
from jengine.config.errors import ConfigError
from jengine.config.paths import flatten
from jengine.config.storage import StorageError, is_url, read_bytes, storage_path, write_bytes
from jengine.extras.cloud.neighbours import Packed, exchange, pack, split_into_rounds, unpack
from jengine.parallel.processes import ProcessGroup

POINTER = "local_copies"

_LOGGER = logging.getLogger("jengine")


class Copy(NamedTuple):
    """Copy of what one process holds.

    Attributes:
      iteration: completed iterations.
      session: drawn at each start of the run: copies of different starts do not belong together.
      owner: the process.
    """

    iteration: int
    session: str
    owner: int


def find_disk(
    directory: str | os.PathLike[str], work_dir: str | os.PathLike[str], run: str
) -> Path:
    """Return where the copies of a run are on the disk of this host.

    Environment variables in `directory` may differ between hosts.

    >>> find_disk("/local", "gs://bucket/run", "3f2a").as_posix()
    '/local/3f2a-e69e696c'
    """
    place = os.fspath(work_dir) if is_url(work_dir) else os.path.realpath(work_dir)
    name = f"{run}-{hashlib.sha256(place.encode()).hexdigest()[:8]}"
    return Path(os.path.expandvars(directory)) / name


def copies_path(disk: Path, owner: int, count: int) -> Path:
    """Return the directory with the copies of one of `count` processes.

    >>> copies_path(Path("/local/3f2a-e69e696c"), 0, 1).as_posix()
    '/local/3f2a-e69e696c/process_0_of_1'
    """
    return disk / f"process_{owner}_of_{count}"


def list_names(directory: Path, last: int | float = math.inf) -> list[str]:
    """Return the names of the copies up to the iteration `last`, oldest first."""
    names = [os.path.basename(path) for path in list_checkpoints(directory)]
    iterations = sorted(int(name[5:]) for name in names if re.fullmatch(r"iter_\d+", name))
    return [f"iter_{iteration}" for iteration in iterations if iteration <= last]


def announce_copies(work_dir: str | os.PathLike[str], directory: str) -> None:
    """Tell a restart in `work_dir` where copies are; one process calls this."""
    write_bytes(storage_path("work_dir", work_dir) / POINTER, directory.encode())


def find_newer_copy(
    work_dir: str | os.PathLike[str], newest: str | None, processes: ProcessGroup
) -> tuple[str, str] | None:
    """Return this process's copy of the newest state that the disks of all hosts together have
    whole, and a line for the log; None if `newest` is not older.

    A process without its copy gets it from a host that keeps it.

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
        known = (_read_line(root / POINTER), read_current_run(root) or "", iteration)
    directory, run, iteration = processes.broadcast("the directory of local copies", known)
    if not directory or not run:
        return None
    disk = find_disk(directory, work_dir, run)
    copies = _list_copies(disk, processes.count, newer_than=iteration)
    holders, problem = _choose(copies, processes)
    if not holders:
        if problem:
            _LOGGER.warning(
                f"The copies on local disks in {directory} are not used, although some are newer "
                f"than the checkpoint: {problem}."
            )
        return None
    note = f"The copies on local disks are newer than {newest or 'any checkpoint'}."
    for owner, holder in enumerate(holders.values()):
        if holder != owner:
            note += f" Process {owner} gets its copy from the disk of process {holder}."
    copy = list(holders)[processes.index]
    path = copies_path(disk, copy.owner, processes.count) / f"iter_{copy.iteration}"
    if problem := _send(holders, copies, path, run, processes):
        _LOGGER.warning(f"The copies on local disks in {directory} are not used: {problem}.")
        return None
    return copies.get(copy, str(path)), note


def _list_copies(disk: Path, count: int, newer_than: int) -> dict[Copy, str]:
    """Return the sealed copies on this host's disk, of all processes, and their paths."""
    copies = {}
    for owner in range(count):
        for path, manifest in find_manifests(copies_path(disk, owner, count)).items():
            if manifest is None or manifest.iteration is None:
                continue  # the process was killed while it wrote it
            if manifest.iteration > newer_than:
                try:
                    session = read_meta(path)["meta"].get("session", "")
                except CorruptCheckpointError as error:
                    _LOGGER.warning(f"skipped the local copy {path}: {error}")
                else:
                    copies[Copy(manifest.iteration, session, owner)] = str(path)
    return copies


def _choose(copies: dict[Copy, str], processes: ProcessGroup) -> tuple[dict[Copy, int], str]:
    """Return the copies of the newest state of which there is one for each process, in their order,
    each with the process on whose disk it is and has been verified.

    Without any, return {} and the reason; "" if there are no copies at all.

    Args:
      copies: those on this host's disk, from which damaged ones are removed.
      processes: all processes.
    """
    while True:
        listed = processes.all_gather("the local copies", sorted(copies))
        found = set().union(*listed)
        if not found:
            return {}, ""
        # A state is whole if the disks together have what each process holds
        states = sorted({copy[:2] for copy in found}, reverse=True)
        owners = {state: [copy.owner for copy in found if copy[:2] == state] for state in states}
        whole = [state for state in states if len(owners[state]) == processes.count]
        if not whole:
            missing = sorted(set(range(processes.count)).difference(owners[states[0]]))
            return {}, (
                f"no disk has the copy of process {', '.join(map(str, missing))} of iteration "
                f"{states[0][0]}"
            )
        holders = {}
        iteration, session = whole[0]
        for owner in range(processes.count):
            copy = Copy(iteration, session, owner)
            # its own disk, before one from which it would have to be sent
            ranked = [owner, *range(processes.count)]
            holders[copy] = next(process for process in ranked if copy in listed[process])
        damaged = []
        for copy in [copy for copy, holder in holders.items() if holder == processes.index]:
            if (problem := validate_checkpoint(Path(copies[copy]), checksums=True)) is not None:
                _LOGGER.warning(f"skipped the local copy {copies.pop(copy)}: {problem}")
                damaged.append(copy)
        wait_for_processes("verification")  # may take longer than devices wait for each other
        if not any(processes.all_gather("the verification of local copies", damaged)):
            return holders, ""


def _send(
    holders: Mapping[Copy, int],
    copies: Mapping[Copy, str],
    path: Path,
    run: str,
    processes: ProcessGroup,
) -> str:
    """Send copies from the disks on which they are to the processes whose they are.

    Args:
      holders: see `_choose`.
      copies: those on this host's disk.
      path: where this process writes what it gets.
      run: the run identifier.
      processes: all processes.

    Returns:
      What did not succeed; "" if all has.
    """
    problem = ""
    sent = {(holder, copy.owner): copy for copy, holder in holders.items() if holder != copy.owner}
    for pairs in split_into_rounds(list(sent)):
        own = [sent[pair] for pair in pairs if pair[0] == processes.index]
        packed = pack(Path(copies[own[0]])) if own else Packed()
        if own and not packed.size:
            problem = f"process {processes.index} could not read the copy that it keeps"
        sizes = processes.all_gather("the sizes of local copies", packed.size)
        content = exchange(pairs, packed, sizes)
        if content is not None:
            try:
                unpack(content, path, run)
            except (OSError, StorageError) as error:
                problem = f"process {processes.index} could not write its copy: {error}"
        wait_for_processes("copies from other disks")
    problems = processes.all_gather("the copies from other disks", problem) if sent else []
    return next(filter(None, problems), "")


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


def _read_line(path: PurePath) -> str:
    try:
        return read_bytes(path).decode().strip()
    except (OSError, ValueError):
        return ""
