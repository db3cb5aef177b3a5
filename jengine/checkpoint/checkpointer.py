"""Writes checkpoints while training goes on."""

import concurrent.futures
import os
import shutil
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jengine.checkpoint import arrays
from jengine.checkpoint.layout import INCOMING, META, OUTGOING, STATE, encode_meta, fault, write_manifest, write_pointer


class CheckpointSaveError(OSError):
    """A checkpoint could not be written. Earlier checkpoints are as they were."""


class Checkpointer:
    """Saves one checkpoint at a time, in the background.

    A save goes through four steps, each of which leaves something to resume from if the process dies in it: the files
    are written under another name; they are renamed; `last_checkpoint` is replaced; older checkpoints are removed.

    With several processes every one of them calls every method; the first one does what is not writing its own arrays.

    Args:
      work_dir: where the text file `last_checkpoint` is kept.
    """

    def __init__(self, work_dir: str | os.PathLike[str]) -> None:
        self._work_dir = Path(work_dir).absolute()
        self._writer: arrays.BackgroundWriter | None = None
        self._executor: concurrent.futures.ThreadPoolExecutor | None = None
        self._pending: concurrent.futures.Future[None] | None = None
        self._saving: Path | None = None

    def save(
        self,
        path: str | os.PathLike[str],
        state: Any,
        meta: Mapping[str, Any],
        *,
        latest: bool = True,
        evict: Iterable[str | os.PathLike[str]] = (),
    ) -> str:
        """Begins a save; first waits for the one before.

        Args:
          path: the directory to become the checkpoint; one that is there is replaced when the new one is whole.
          state: pytree of arrays, typed PRNG keys included. It may be donated as soon as this returns.
          meta: everything else, as JSON can store it; the number in `meta["meta"]["iter"]` orders checkpoints when
            one is searched.
          latest: whether `last_checkpoint` shall name it.
          evict: checkpoints to remove once this one is whole.

        Returns:
          The absolute path.

        Raises:
          CheckpointSaveError: this save could not begin, or the one before failed.
          TypeError, ValueError: something in `state` or `meta` cannot be stored; nothing was written.
        """
        path = Path(path).absolute()
        text = encode_meta(meta)
        self.wait()  # before the next copy of the state is made
        storable = arrays.encode(state)
        incoming = path.with_name(path.name + INCOMING)
        self._saving = path
        try:
            if _is_primary():
                path.parent.mkdir(parents=True, exist_ok=True)
                _tidy(path.parent)
            if self._writer is None:
                self._writer = arrays.BackgroundWriter()
                self._executor = concurrent.futures.ThreadPoolExecutor(1, thread_name_prefix="jengine-checkpoint")
            end_write = self._writer.begin(incoming / STATE, storable)
        except Exception as error:
            raise self._failure(error) from error
        assert self._executor is not None
        self._pending = self._executor.submit(
            self._commit, path, end_write, text, meta["meta"]["iter"], latest, tuple(map(Path, evict))
        )
        return str(path)

    def wait(self) -> None:
        """Returns when nothing is being saved.

        Raises:
          CheckpointSaveError: the save that was under way has failed.
        """
        if self._pending is None:
            return
        try:
            self._pending.result()
        except Exception as error:
            raise self._failure(error) from error
        finally:
            if self._pending.done():  # an interrupt of the wait leaves the save under way
                self._pending = None

    def delete(self, path: str | os.PathLike[str]) -> None:
        """Removes a checkpoint, after a save that is under way; nothing happens if it is not there."""
        self.wait()
        if _is_primary():
            _discard(Path(path).absolute())

    def close(self) -> None:
        """Waits for the last save and ends the background threads. Called twice it does nothing more."""
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
        end_write: Callable[[], None],
        meta: str,
        iteration: int | None,
        latest: bool,
        evict: tuple[Path, ...],
    ) -> None:
        """Runs in the background thread: ends the write of the arrays, seals the checkpoint and gives it its name."""
        end_write()
        if _is_primary():
            incoming = path.with_name(path.name + INCOMING)
            (incoming / META).write_text(meta)
            write_manifest(incoming, latest=latest, iteration=iteration)
            outgoing = path.with_name(path.name + OUTGOING)
            if path.exists():
                _remove(outgoing)
                path.rename(outgoing)
            incoming.rename(path)
            _remove(outgoing)
            if latest:
                write_pointer(self._work_dir, str(path))
            for old in evict:
                _discard(old.absolute())
        if jax.process_count() > 1:
            from orbax.checkpoint import multihost

            key = multihost.unique_barrier_key("jengine:commit", suffix=path.name)
            multihost.sync_global_processes(key, processes=arrays.all_processes())

    def _failure(self, error: Exception) -> CheckpointSaveError:
        path = self._saving
        assert path is not None
        if _is_primary():
            _remove(path.with_name(path.name + INCOMING), ignore_errors=True)
        reason = str(error) or type(error).__name__
        return CheckpointSaveError(f"checkpoint {path} could not be saved, earlier ones are whole: {reason}")


def _is_primary() -> bool:
    return jax.process_index() == 0


def _tidy(directory: Path) -> None:
    """Ends what a killed process has begun: a replacement that only lacked its name gets it, the rest goes."""
    for incoming in directory.glob(f"*{INCOMING}"):
        path = incoming.with_name(incoming.name.removesuffix(INCOMING))
        if not path.exists() and fault(incoming) is None:
            incoming.rename(path)
        else:
            _remove(incoming)
    for outgoing in directory.glob(f"*{OUTGOING}"):
        _remove(outgoing)


def _discard(path: Path) -> None:
    # Renamed first: a kill while files are being removed leaves nothing that looks like a checkpoint.
    if path.is_dir() and not path.is_symlink():
        outgoing = path.with_name(path.name + OUTGOING)
        _remove(outgoing)
        path.rename(outgoing)
        _remove(outgoing)
    else:
        path.unlink(missing_ok=True)


def _remove(path: Path, ignore_errors: bool = False) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=ignore_errors)
