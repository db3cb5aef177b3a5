"""Copies on this host's disk, of its own processes and those that it keeps for others."""

import collections
import concurrent.futures
import logging
import re
from collections.abc import Sequence
from pathlib import Path

from jengine.checkpoint import commit
from jengine.checkpoint.checkpointer import Checkpointer
from jengine.config.storage import StorageError, list_directory
from jengine.extras.cloud.local_copies import copies_path, list_names
from jengine.extras.cloud.neighbours import Packed, choose_keepers, exchange, unpack
from jengine.parallel.processes import ProcessGroup

_LOGGER = logging.getLogger("jengine")


class KeptCopies:
    """Copies that processes on different hosts keep for each other.

    Args:
      disk: the directory with all copies of the run on this host.
      run: the run identifier.
      places: host name and directory of each process.
      neighbours: other hosts that keep each copy, if there are as many.
      processes: all processes, which call `exchange` together.

    Attributes:
      has_neighbours: whether any copy is kept on another host.
    """

    def __init__(
        self,
        disk: Path,
        run: str,
        places: Sequence[tuple[str, str]],
        neighbours: int,
        processes: ProcessGroup,
    ) -> None:
        self._disk = disk
        self._run = run
        self._places = places
        self._processes = processes
        self._rings = choose_keepers(places, neighbours)
        self.has_neighbours = bool(self._rings)
        self._remover = Checkpointer(disk, run, alone=True)
        self._pending: list[tuple[int, concurrent.futures.Future[None]]] = []
        if neighbours and processes.count > 1:
            self._report()

    def _report(self) -> None:
        keepers = collections.Counter(owner for ring in self._rings for owner, _ in ring)
        without = [owner for owner in range(len(self._places)) if keepers[owner] == 0]
        if not self._rings:
            _LOGGER.info("Local copies are kept on one host: the run has no other.")
        elif without:
            _LOGGER.warning(
                f"No other host keeps the local copies of process {', '.join(map(str, without))}: "
                "the hosts must have as many processes each"
            )
        else:
            others = "another host" if len(self._rings) == 1 else f"{len(self._rings)} other hosts"
            _LOGGER.info(f"Each local copy is kept on {others} too.")

    def tidy(self, last: int) -> None:
        """Remove copies of iterations after `last`, and those that are no longer kept here.

        One process does it for all with the same disk, before any of them writes.
        """
        here = self._places[self._processes.index]
        beside = {process for process, place in enumerate(self._places) if place == here}
        if min(beside) != self._processes.index:
            return
        kept = {owner for ring in self._rings for owner, keeper in ring if keeper in beside}
        count = self._processes.count
        used = {copies_path(self._disk, owner, count).name for owner in beside | kept}
        for name in list_directory(self._disk):
            if re.fullmatch(r"process_\d+_of_\d+", name):
                directory = self._disk / name
                commit.clean_up(directory)  # what a killed process has left unfinished
                stay = list_names(directory, last) if name in used else []
                self._remover.evict(directory, set(list_names(directory)).difference(stay))

    def exchange(self, packed: Packed | None, name: str) -> bool:
        """Send this process's copy to its neighbours, and keep what is sent here, in the
        background.

        Args:
          packed: the copy; empty if it could not be written, None while it is written.
          name: of the copy, equal on all processes.

        Returns:
          Whether it was sent; False if a process has not written its own.
        """
        sizes = self._processes.all_gather(
            "the sizes of local copies", -1 if packed is None else packed.size
        )
        if packed is None or min(sizes) < 0:
            return False
        for ring in self._rings:
            content = exchange(ring, packed, sizes)
            if content is not None:
                owners = {keeper: owner for owner, keeper in ring}
                owner = owners[self._processes.index]
                # A future, unlike a thread, keeps an error for `wait`
                thread = concurrent.futures.ThreadPoolExecutor(
                    1, thread_name_prefix="jengine-checkpoint"
                )
                self._pending.append((owner, thread.submit(self._keep, content, owner, name)))
                thread.shutdown(wait=False)
        return True

    def _keep(self, content: memoryview, owner: int, name: str) -> None:
        directory = copies_path(self._disk, owner, self._processes.count)
        unpack(content, directory / name, self._run)
        # all processes have the last one, so those before can go
        self._remover.evict(directory, list_names(directory)[:-2])

    def wait(self) -> None:
        """Wait until what was sent here is on disk; a failure is a warning."""
        while self._pending:
            owner, future = self._pending[0]
            try:
                future.result()
            except (OSError, StorageError) as error:
                _LOGGER.warning(f"A copy of process {owner} could not be kept here: {error}")
            self._pending.pop(0)
