"""Checkpoint writer that works in the background while training continues."""

import concurrent.futures
import contextlib
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoint import arrays
from jengine.checkpoint.layout import INCOMING, OUTGOING, encode_meta, pack_states, write_meta, write_pointer
from jengine.checkpoint.manifest import (
    STATE,
    claim,
    has_manifest,
    read_manifest,
    remove,
    seal,
    seal_part,
    sync,
    validate_checkpoint,
)
from jengine.checkpoint.progress import wait_for_processes


class CheckpointSaveError(OSError):
    """Error of a save that failed. Earlier checkpoints are intact."""


class Checkpointer:
    """Checkpoint manager that saves one checkpoint at a time, in the background.

    A save has four steps: write the files into a temporary directory, rename it, update `last_checkpoint`, and remove
    older checkpoints. Each step is on disk before the next begins, so a complete checkpoint is left whenever the
    process is killed or the power fails. Directories without a manifest are never replaced or removed.

    With several processes, all should call every method. Each writes, hashes and syncs the local arrays; the first one
    does the rest.

    Args:
      work_dir: where the text file `last_checkpoint` is.
      run: the run identifier. Only checkpoints with the same one are replaced or evicted.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as directory:
    ...     checkpointer = Checkpointer(directory)
    ...     path = checkpointer.save(f"{directory}/iter_1", {"x": jax.numpy.ones(2)}, {"meta": {"iter": 1}})
    ...     checkpointer.close()
    ...     sorted(os.listdir(directory))
    ['iter_1', 'last_checkpoint']
    """

    def __init__(self, work_dir: str | os.PathLike[str], run: str = "") -> None:
        self._work_dir = Path(work_dir).absolute()
        self._run = run
        self._writer = arrays.BackgroundWriter()
        self._pending: concurrent.futures.Future[None] | None = None
        self._pending_path: Path | None = None

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
          path: the directory to write; this run's checkpoint there is replaced once the new one is complete.
          state: pytree with arrays and typed PRNG keys. It may be donated as soon as this returns.
          meta: everything else, in types that JSON can store; `hooks` and `data` may have arrays and bytes. The search
            for the latest checkpoint compares `meta["meta"]["iter"]`.
          latest: whether to point `last_checkpoint` to it.
          evict: names in the same directory to remove once this checkpoint is complete, if this run wrote them.
          checksums: whether to store SHA-256 hashes, about a second per gigabyte in the background.

        Returns:
          The absolute path.

        Raises:
          CheckpointSaveError: this save could not start, or the previous save failed.
          TypeError, ValueError: something in `state` or `meta` cannot be stored; nothing was written.
        """
        path = Path(path).absolute()
        packed, blobs = pack_states(meta)
        text = encode_meta(packed)  # a wrong entry fails here, before anything is written
        self.wait()  # first, so only one copy of the state is in memory
        storable = arrays.encode(state)  # the copy, if the state is in host memory
        incoming = path.with_name(path.name + INCOMING)
        self._pending_path = path  # for the error message
        try:
            if _is_primary():
                path.parent.mkdir(parents=True, exist_ok=True)
                _clean_up(path.parent)  # a killed run may have left a save or a removal unfinished
                if path.exists() and not self._is_own(path):
                    raise FileExistsError(f"{path} exists and is not a checkpoint of this run; move it elsewhere")
                claim(incoming, self._run)
            finish_write = self._writer.start(incoming / STATE, storable)
        except Exception as error:
            raise self._save_error(error) from error
        # A future, unlike a thread, keeps an error for `wait`
        thread = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jengine-checkpoint")
        sealing = dict(run=self._run, is_latest=latest, iteration=meta["meta"]["iter"], checksums=checksums)
        self._pending = thread.submit(self._commit, path, finish_write, (text, blobs), tuple(evict), sealing)
        thread.shutdown(wait=False)  # it ends after this save
        return str(path)

    def wait(self) -> None:
        """Wait until the save in progress has finished.

        Raises:
          CheckpointSaveError: the save failed.
        """
        if self._pending is None:
            return
        try:
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
        if _is_primary():
            _delete_checkpoint(Path(path).absolute())

    def evict(self, directory: str | os.PathLike[str], names: Iterable[str]) -> None:
        """Remove checkpoints that this run wrote, after the save in progress; skip all other names in `directory`."""
        self.wait()
        if _is_primary():
            self._evict(Path(directory).absolute(), names)

    def close(self) -> None:
        """Wait for the last save and stop the background threads."""
        try:
            self.wait()
        finally:
            self._writer.close()

    def _commit(
        self,
        path: Path,
        finish_write: Callable[[], None],
        meta: tuple[str, bytes],
        evict: Sequence[str],
        sealing: Mapping[str, Any],
    ) -> None:
        """Finish writing the arrays, then complete and rename the checkpoint; runs in the background thread."""
        finish_write()
        incoming = path.with_name(path.name + INCOMING)
        if jax.process_count() > 1:
            seal_part(incoming, jax.process_index(), checksums=sealing["checksums"])
            wait_for_processes("hashes of a save")
        if _is_primary():
            write_meta(incoming, *meta)
            seal(incoming, **sealing)
            outgoing = path.with_name(path.name + OUTGOING)
            if path.exists():
                remove(outgoing)
                path.rename(outgoing)  # a rename over a directory with files fails
            incoming.rename(path)
            sync(path.parent)  # the rename is on disk before anything older is removed
            if sealing["is_latest"]:
                write_pointer(self._work_dir, str(path))
            remove(outgoing)
            self._evict(path.parent, evict)
        wait_for_processes("end of a save")

    def _is_own(self, path: Path) -> bool:
        manifest = read_manifest(path)
        return manifest is not None and manifest.run == self._run

    def _evict(self, directory: Path, names: Iterable[str]) -> None:
        existing = {path.name: path for path in directory.iterdir()} if directory.is_dir() else {}
        for path in (existing[name] for name in names if name in existing):  # a name is data: never a path
            if self._is_own(path):
                _delete_checkpoint(path)

    def _save_error(self, error: Exception) -> CheckpointSaveError:
        path = self._pending_path
        assert path is not None
        if _is_primary():
            with contextlib.suppress(OSError):  # the reason of the failure matters more
                remove(path.with_name(path.name + INCOMING))
        reason = str(error) or type(error).__name__
        return CheckpointSaveError(f"could not save checkpoint {path} (earlier checkpoints are intact): {reason}")


def _is_primary() -> bool:
    return jax.process_index() == 0


def _clean_up(directory: Path) -> None:
    """Finish or discard interrupted saves: rename complete checkpoints whose name is free, remove the others."""
    for incoming in filter(has_manifest, directory.glob(f"*{INCOMING}")):
        path = incoming.with_name(incoming.name.removesuffix(INCOMING))
        if not path.exists() and validate_checkpoint(incoming) is None:
            incoming.rename(path)
        else:
            remove(incoming)
    for outgoing in filter(has_manifest, directory.glob(f"*{OUTGOING}")):
        remove(outgoing)


def _delete_checkpoint(path: Path) -> None:
    # Rename first: a process killed in the middle of the removal leaves nothing that looks like a checkpoint.
    if path.exists() and not has_manifest(path):
        raise FileExistsError(f"{path} is not a checkpoint of jengine, so it is not removed")
    outgoing = path.with_name(path.name + OUTGOING)
    remove(outgoing)
    if path.exists():
        path.rename(outgoing)
        remove(outgoing)
