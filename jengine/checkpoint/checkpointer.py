"""Checkpoint writer that works in the background while training continues."""

import concurrent.futures
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import PurePath
from typing import Any

import jax

from jengine.checkpoint import commit
from jengine.checkpoint.arrays import encode
from jengine.checkpoint.layout import encode_meta, write_pointer
from jengine.checkpoint.manifest import STATE, read_manifest, seal, seal_part
from jengine.checkpoint.orbax import start_write
from jengine.checkpoint.progress import wait_for_processes
from jengine.config.storage import is_url, storage_path, write_bytes
from jengine.logging.watchdog import Wait


class CheckpointSaveError(OSError):
    """Error of a save to `path` that failed; other checkpoints are intact."""

    path: PurePath | None = None


class Checkpointer:
    """Checkpoint manager that saves one checkpoint at a time, in the background.

    A save has four steps: write the files and seal them (see `jengine.checkpoint.commit`), update
    `last_checkpoint`, and remove older checkpoints. Each step is on disk before the next begins, so
    a complete checkpoint is left whenever the process is killed or the power fails. Directories
    without a manifest are never replaced or removed.

    Before the seal, Orbax reads the structure of the arrays.

    With several processes, all should call every method. Each writes, hashes and syncs the local
    arrays; the first one does the rest.

    Args:
      work_dir: where the text file `last_checkpoint` is: a directory or a URL.
      run: the run identifier. Only checkpoints with the same one are replaced or evicted.
      before_seal: called on the first process when everything but the seal is written. If it
        raises, the save fails.
      alone: whether each of several processes writes checkpoints of its own, with all that its
        devices hold, to directories that the others do not use, and without waiting for them.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpointer = Checkpointer(directory)
    ...     path = checkpointer.save(
    ...         f"{directory}/iter_1", {"x": jax.numpy.ones(2)}, {"meta": {"iter": 1}}
    ...     )
    ...     checkpointer.close()
    ...     sorted(os.listdir(directory))
    ['iter_1', 'last_checkpoint']
    """

    def __init__(
        self,
        work_dir: str | os.PathLike[str],
        run: str = "",
        before_seal: Callable[[], object] = lambda: None,
        alone: bool = False,
    ) -> None:
        self._work_dir = storage_path("work_dir", work_dir)
        self._run = run
        self._before_seal = before_seal
        self._alone = alone
        self._pending: concurrent.futures.Future[None] | None = None
        self._pending_path: PurePath | None = None
        # directories on object storage without what a killed run left
        self._cleaned: set[PurePath] = set()

    @property
    def is_saving(self) -> bool:
        """True while a save is in progress."""
        return self._pending is not None and not self._pending.done()

    def save(
        self,
        path: str | os.PathLike[str],
        state: Any,
        meta: Mapping[str, Any],
        *,
        latest: bool = True,
        evict: Iterable[str] = (),
        checksums: bool = True,
    ) -> str:
        """Wait for the previous save, then start a new one.

        Args:
          path: the directory or URL to write; this run's checkpoint there is replaced once the new
            one is complete, on object storage when this save begins.
          state: pytree with arrays and typed PRNG keys. It may be donated as soon as this returns.
          meta: everything else, in types that JSON can store; `hooks` and `data` may have arrays
            and bytes. The search for the latest checkpoint compares `meta["meta"]["iter"]`.
          latest: whether to point `last_checkpoint` to it.
          evict: names in the same directory to remove once this checkpoint is complete, if this run
            wrote them.
          checksums: whether to store SHA-256 hashes, about a second per gigabyte in the background.

        Returns:
          The absolute path.

        Raises:
          CheckpointSaveError: the previous save failed, or this one already has.
          TypeError, ValueError: something in `state` or `meta` cannot be stored; nothing was
            written.
        """
        target = storage_path("path", path)
        files = encode_meta(meta)  # a wrong entry fails here, before anything is written
        self.wait()  # first, so only one copy of the state is in memory
        # the copy, if the state is in host memory
        storable = encode(state, alone=self._alone)
        self._pending_path = target  # for the error message
        try:
            finish_write = start_write(
                commit.find_incoming(target) / STATE,
                storable,
                alone=self._alone,
                prepare=lambda: self._begin(target),
            )
        except Exception as error:
            raise self._save_error(error) from error

        names = tuple(evict)
        iteration = meta["meta"]["iter"]

        # The order is what makes a kill at any line harmless: arrays, their hashes from all
        # processes, metadata, the seal, the rename, and only then the pointer and the removal of
        # older checkpoints.
        def finish() -> None:
            finish_write()
            incoming = commit.find_incoming(target)
            if jax.process_count() > 1 and not self._alone:
                seal_part(incoming, jax.process_index(), checksums=checksums)
                wait_for_processes("hashes of a save", incoming / STATE)
            if self._is_primary():
                for name, content in files.items():
                    write_bytes(incoming / name, content)
                self._before_seal()
                seal(incoming, self._run, latest, iteration, checksums)
                commit.finish(target)
                if latest:
                    write_pointer(self._work_dir, target)
                self._evict(target.parent, names)
            if not self._alone:
                # Also at the end: a process that left earlier could start the next save while the
                # first one is still renaming this.
                wait_for_processes("end of a save")

        # A future, unlike a thread, keeps an error for `wait`
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jengine-checkpoint")
        self._pending = thread.submit(finish)
        thread.shutdown(wait=False)  # it ends after this save
        return str(target)

    def wait(self) -> None:
        """Wait until the save in progress has finished.

        Raises:
          CheckpointSaveError: the save failed.
        """
        if self._pending is None:
            return
        try:
            with Wait(f"the save to {self._pending_path}"):
                self._pending.result()
        except Exception as error:
            raise self._save_error(error) from error
        finally:
            if self._pending.done():  # an interrupted wait leaves the save in progress
                self._pending = None

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Remove a checkpoint, whichever run wrote it, after the save in progress.

        Raises:
          FileExistsError: the directory is not a checkpoint.
        """
        self.wait()
        if self._is_primary():
            commit.delete(storage_path("path", path))

    def evict(self, directory: str | os.PathLike[str], names: Iterable[str]) -> None:
        """Remove checkpoints that this run wrote, after the save in progress.

        Skip all other names in `directory`.
        """
        self.wait()
        if self._is_primary():
            self._evict(storage_path("directory", directory), names)

    def close(self) -> None:
        """Wait for the last save."""
        self.wait()

    def _is_primary(self) -> bool:
        return self._alone or jax.process_index() == 0

    def _begin(self, path: PurePath) -> None:
        if not self._is_primary():
            return
        if path.parent not in self._cleaned:
            # a killed run may have left a save or a removal unfinished
            commit.clean_up(path.parent)
        # one listing for the whole run: afterwards a failed save removes its own files
        if is_url(path):
            self._cleaned.add(path.parent)
        commit.begin(path, self._run)

    def _evict(self, directory: PurePath, names: Iterable[str]) -> None:
        for name in names:
            # a name is data: never a path
            if os.path.basename(name) != name or not name.strip("."):
                continue
            path = directory / name
            manifest = read_manifest(path)
            if manifest is not None and manifest.run == self._run:
                commit.delete(path)

    def _save_error(self, error: Exception) -> CheckpointSaveError:
        path = self._pending_path
        assert path is not None
        if self._is_primary():
            commit.abandon(path)
        reason = str(error) or type(error).__name__
        full = "No space left on device"  # TensorStore adds a chain of its own files
        save_error = CheckpointSaveError(
            f"could not save checkpoint {path} (others are intact): "
            f"{full if full in reason else reason}"
        )
        save_error.path = path
        return save_error
