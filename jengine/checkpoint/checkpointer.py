"""Write checkpoints in the background while training continues."""

import concurrent.futures
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoint import arrays
from jengine.checkpoint.layout import (
    INCOMING,
    META,
    OUTGOING,
    STATE,
    encode_meta,
    validate_checkpoint,
    write_manifest,
    write_pointer,
)


class CheckpointSaveError(OSError):
    """Signal that a checkpoint could not be written. Earlier checkpoints are intact."""


class Checkpointer:
    """Save one checkpoint at a time, in the background.

    A save has four steps: write the files into a temporary directory, rename it, update `last_checkpoint`, and remove
    older checkpoints. A process that is killed in any of them leaves a complete checkpoint.

    With several processes, all of them call every method. Each writes its own arrays; the first one does the rest.

    Args:
      work_dir: the directory of the text file `last_checkpoint`.
    """

    def __init__(self, work_dir: str | os.PathLike[str]) -> None:
        self._work_dir = Path(work_dir).absolute()
        self._writer: arrays.BackgroundWriter | None = None
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[None] | None = None
        self._pending_path: Path | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        state: Any,
        meta: Mapping[str, Any],
        *,
        latest: bool = True,
        evict: Iterable[str | os.PathLike[str]] = (),
    ) -> str:
        """Wait for the previous save, then start a new one.

        Args:
          path: the checkpoint's directory; an existing one is replaced once the new one is complete.
          state: pytree of arrays, typed PRNG keys included. It may be donated as soon as this returns.
          meta: everything else, in types that JSON can store; the search for the latest checkpoint compares
            `meta["meta"]["iter"]`.
          latest: whether to point `last_checkpoint` to it.
          evict: checkpoints to remove once this one is complete.

        Returns:
          The absolute path.

        Raises:
          CheckpointSaveError: this save could not start, or the previous save failed.
          TypeError, ValueError: something in `state` or `meta` cannot be stored; nothing was written.
        """
        path = Path(path).absolute()
        text = encode_meta(meta)
        self.wait()  # first, so that only one copy of the state is in memory
        storable = arrays.encode(state)
        incoming = path.with_name(path.name + INCOMING)
        self._pending_path = path
        try:
            if _is_primary():
                path.parent.mkdir(parents=True, exist_ok=True)
                _clean_up(path.parent)
            if self._writer is None:
                self._writer = arrays.BackgroundWriter()
                self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jengine-checkpoint")
            finish_write = self._writer.start(incoming / STATE, storable)
        except Exception as error:
            raise self._save_error(error) from error
        assert self._executor is not None
        self._pending = self._executor.submit(
            self._commit, path, finish_write, text, meta["meta"]["iter"], latest, tuple(map(Path, evict))
        )
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
        """Remove a checkpoint if it exists, after the save in progress."""
        self.wait()
        if _is_primary():
            _delete_checkpoint(Path(path).absolute())

    def close(self) -> None:
        """Wait for the last save and stop the background threads. A second call does nothing."""
        try:
            self.wait()
        finally:
            if self._writer is not None and self._executor is not None:
                self._executor.shutdown()
                self._writer.close()
                self._writer = self._executor = None

    def _commit(
        self,
        path: Path,
        finish_write: Callable[[], None],
        meta: str,
        iteration: int | None,
        latest: bool,
        evict: tuple[Path, ...],
    ) -> None:
        """Finish writing the arrays, then complete and rename the checkpoint; runs in the background thread."""
        finish_write()
        if _is_primary():
            incoming = path.with_name(path.name + INCOMING)
            (incoming / META).write_text(meta)
            write_manifest(incoming, latest=latest, iteration=iteration)
            outgoing = path.with_name(path.name + OUTGOING)
            if path.exists():
                _remove_tree(outgoing)
                path.rename(outgoing)
            incoming.rename(path)
            _remove_tree(outgoing)
            if latest:
                write_pointer(self._work_dir, str(path))
            for old in evict:
                _delete_checkpoint(old.absolute())
        if jax.process_count() > 1:
            from orbax.checkpoint import multihost

            key = multihost.unique_barrier_key("jengine:commit", suffix=path.name)
            multihost.sync_global_processes(key, processes=arrays.process_indices())

    def _save_error(self, error: Exception) -> CheckpointSaveError:
        path = self._pending_path
        assert path is not None
        if _is_primary():
            _remove_tree(path.with_name(path.name + INCOMING), ignore_errors=True)
        reason = str(error) or type(error).__name__
        return CheckpointSaveError(f"could not save checkpoint {path} (earlier checkpoints are intact): {reason}")


def _is_primary() -> bool:
    return jax.process_index() == 0


def _clean_up(directory: Path) -> None:
    """Finish or discard interrupted saves: rename complete checkpoints whose name is free, remove the other files."""
    for incoming in directory.glob(f"*{INCOMING}"):
        path = incoming.with_name(incoming.name.removesuffix(INCOMING))
        if not path.exists() and validate_checkpoint(incoming) is None:
            incoming.rename(path)
        else:
            _remove_tree(incoming)
    for outgoing in directory.glob(f"*{OUTGOING}"):
        _remove_tree(outgoing)


def _delete_checkpoint(path: Path) -> None:
    # Rename first: a process killed in the middle of the removal leaves nothing that looks like a checkpoint.
    if path.is_dir() and not path.is_symlink():
        outgoing = path.with_name(path.name + OUTGOING)
        _remove_tree(outgoing)
        path.rename(outgoing)
        _remove_tree(outgoing)
    else:
        path.unlink(missing_ok=True)


def _remove_tree(path: Path, ignore_errors: bool = False) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=ignore_errors)
