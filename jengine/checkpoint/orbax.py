"""Adapter to Orbax, which stores the arrays. No other module reads or writes arrays with it.

Only Orbax's handler for pytrees is used: where the files are, when they count and how processes
wait for each other is decided in this package. Each process writes the shards of its devices, and
the first one merges the indices when all are done.
"""

import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path, PurePath
from typing import Any

import jax
import numpy as np
from etils import epath

from jengine.checkpoint.arrays import find_empty, put_like
from jengine.checkpoint.progress import wait_for_processes
from jengine.config.paths import flatten, map_with_path
from jengine.config.plugins import load_each
from jengine.config.storage import StorageError, find_scheme, is_url, read_bytes

# Orbax puts paths into patterns of globs, and TensorStore takes a backslash for a slash
_SPECIAL = re.compile(r"[*?\[\]\\]")
_ATTEMPTS = 5  # of a read
_Structs = Mapping[str, jax.ShapeDtypeStruct]


def start_write(
    directory: PurePath,
    state: Any,
    *,
    alone: bool = False,
    prepare: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """Start to write a state that `encode` returned; device arrays may be donated afterwards.

    All processes call this, and the first one merges what they have written.

    Args:
      directory: `state` in a checkpoint, which must not exist.
      state: the arrays.
      alone: whether this process writes all that its devices hold, without the others.
      prepare: called before anything is written, if possible by the function that is returned.

    Returns:
      A function that finishes the write and raises StorageError unless Orbax can read the structure
      of what was written; call it once, in any thread.
    """
    scheme = find_scheme(directory)
    if scheme is not None and scheme.is_staged:
        return scheme.upload_after(
            lambda local: start_write(local, state, alone=alone), directory, prepare
        )
    path = epath.Path(_make_plain(directory))
    written = {name: (leaf.shape, leaf.dtype) for name, leaf in flatten(state).items()}
    # `pop` takes the last reference, so that a copy is freed when it is written
    states = [state]

    def start() -> tuple[Any, Any]:
        prepare()
        if not alone:
            wait_for_processes("start of a save")
        if not is_url(path):
            os.makedirs(path, exist_ok=True)
        import orbax.checkpoint as ocp

        handler = _make_handler(alone)
        # In a thread, since a notebook has an event loop in this one
        with concurrent.futures.ThreadPoolExecutor(1) as pool:
            save = handler.async_save(path, args=ocp.args.PyTreeSave(states.pop()))
            return handler, pool.submit(asyncio.run, save).result()

    def finish() -> None:
        handler, futures = start() if started is None else started
        for future in futures:
            future.result()
        if not alone:
            wait_for_processes("arrays of a save", directory)
        if alone or jax.process_index() == 0:
            handler.finalize(path)
            stored = flatten(_read_stored_structs(directory))
            if {name: (leaf.shape, leaf.dtype) for name, leaf in stored.items()} != written:
                raise StorageError(f"{directory} has other arrays than the state that was saved")

    # Only arrays on devices must have been copied when this returns
    has_devices = any(isinstance(leaf, jax.Array) for leaf in jax.tree.leaves(state))
    started = start() if has_devices else None
    return finish


def read_structs(directory: PurePath) -> Any:
    """Return the tree on disk with a ShapeDtypeStruct for each array, without reading arrays.

    A string, which other training loops may store, has the dtype object.
    """

    def replace(node: Any) -> Any:
        return node if (empty := find_empty(node)) is None else empty

    return jax.tree.map(
        replace, _read_stored_structs(directory), is_leaf=lambda node: find_empty(node) is not None
    )


def read(directory: PurePath, structs: _Structs) -> dict[str, Any]:
    """Read arrays from disk by dotted path.

    If a sharding has devices of several processes, all of them call this together: with an extra
    for it, what more than one needs is read by one of them.

    Args:
      directory: `state` in a checkpoint.
      structs: the arrays to read. One with a sharding becomes a JAX array with that sharding,
        others become NumPy arrays.
    """
    if jax.process_count() > 1:
        for read_shared in load_each("shared_reads"):
            return dict(read_shared(directory, structs))
    return read_own(directory, structs)


def read_own(directory: PurePath, structs: _Structs) -> dict[str, Any]:
    """Read arrays as `read`, without other processes."""
    import orbax.checkpoint as ocp

    def restore_args(path: str, _: Any) -> Any:
        leaf = structs.get(path)
        if leaf is None:
            return ocp.RestoreArgs()
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(
            sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape
        )

    if not structs:
        return {}
    local = _find_local(directory, arrays=True)
    tree = _read_stored_structs(local)  # Orbax wants the whole tree, not only what is read
    item = map_with_path(lambda path, leaf: structs.get(path, ocp.PLACEHOLDER), tree)
    args = ocp.args.PyTreeRestore(item=item, restore_args=map_with_path(restore_args, tree))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    # Without a limit, Orbax holds two copies of most arrays. The largest array must fit into the
    # limit.
    limit = max(2 * max(sizes), sum(sizes) // 10) / 1e9
    with contextlib.closing(_make_handler(restore_concurrent_gb=limit)) as handler:
        restored = _retry(local, lambda: handler.restore(epath.Path(local), args=args))
    leaves = flatten(restored)
    return {
        name: leaves[name]
        if struct.size
        else put_like(np.zeros(struct.shape, struct.dtype), struct)
        for name, struct in structs.items()
    }


def _read_stored_structs(directory: PurePath) -> Any:
    text = jax.ShapeDtypeStruct((), np.dtype(object))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else text,
        read_metadata(directory),
    )


def read_metadata(directory: PurePath) -> Any:
    """Return Orbax's metadata of each array in `state`, as a tree like that of the arrays."""
    version = b""
    local = _find_local(directory)
    if is_url(local):
        # of arrays that are not in Orbax's OCDBT format
        with contextlib.suppress(FileNotFoundError):
            version = read_bytes(local / "manifest.ocdbt")  # each save has another
    return _read_cached_metadata(os.fspath(local), version) if version else _read_metadata(local)


@functools.lru_cache(maxsize=1)
def _read_cached_metadata(directory: str, version: bytes) -> Any:
    return _read_metadata(directory)  # seven requests, which a resume would repeat three times


def _read_metadata(directory: str | PurePath) -> Any:
    """Read the metadata without the cache."""
    with contextlib.closing(_make_handler()) as handler:
        return _retry(directory, lambda: handler.metadata(epath.Path(directory)).tree)


def _retry(directory: str | PurePath, read: Callable[[], Any]) -> Any:
    """Return what `read` returns, with retries.

    TensorStore's errors do not tell an answer that was cut off from damaged data.
    """
    attempts = _ATTEMPTS
    while True:
        try:
            return read()
        except jax.errors.JaxRuntimeError:  # of a device, such as too little memory
            raise
        except Exception as error:  # of any type, also about a file that another version wrote
            attempts -= 1
            if attempts == 0:
                raise StorageError(
                    f"Orbax cannot read the arrays of {directory}: {error}"
                ) from error


def _find_local(directory: PurePath, *, arrays: bool = False) -> PurePath:
    """Return a path at which Orbax can read the structure in `directory`, or also the arrays."""
    scheme = find_scheme(directory)
    return _make_plain(directory) if scheme is None else scheme.find_local(directory, arrays=arrays)


def _make_plain(directory: PurePath) -> PurePath:
    """Return another path of a local directory if Orbax could not read or write at its own: one
    through a link.

    >>> _make_plain(epath.Path("/runs/a")).as_posix()
    '/runs/a'
    """
    if is_url(directory) or not _SPECIAL.search(str(directory)):
        return directory
    is_there = os.path.exists(directory)  # one that will be written is not
    target = str(directory if is_there else directory.parent)
    link = Path(_make_link_directory().name, hashlib.sha256(os.fsencode(target)).hexdigest()[:16])
    with contextlib.suppress(FileExistsError):
        link.symlink_to(target)
    return link if is_there else link / directory.name


@functools.cache
def _make_link_directory() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="jengine-links-")  # until the process ends


def _make_handler(alone: bool = True, **settings: Any) -> Any:
    """Return Orbax's handler; a Checkpointer would look for the files of its own commits, with
    many requests, and wait for all processes, at most 300 s.
    """
    import orbax.checkpoint as ocp

    # Orbax logs every step through absl's root logger; failures reach the caller as exceptions.
    logging.getLogger("absl").addFilter(_is_from_elsewhere)
    options = ocp.options.MultiprocessingOptions(primary_host=jax.process_index() if alone else 0)
    return ocp.PyTreeCheckpointHandler(
        # trained weights hardly shrink, and compression steals cores from the next step
        use_compression=False,
        type_handler_registry=_type_handlers(alone and jax.process_count() > 1),
        multiprocessing_options=options,
        **settings,
    )


@functools.cache
def _type_handlers(all_shards: bool) -> Any:
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    # each process writes, also what others hold as well
    local = dict(primary_host=None, replica_id=None) if all_shards else {}
    # By default Orbax cuts a replicated array into one slice per replica. That compiles a program
    # for each array and blocks the first save for seconds.
    return handlers.create_type_handler_registry(
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),  # `encode` copied them
        (jax.Array, handlers.ArrayHandler(use_replica_parallel=False, **local)),
        # Only in the checkpoints of other loops:
        *((kind, handlers.ScalarHandler()) for kind in (int, float, bytes, np.number)),
        (str, handlers.StringHandler()),
    )


def _is_from_elsewhere(record: logging.LogRecord) -> bool:
    return "/orbax/" not in record.pathname.replace("\\", "/")


@contextlib.contextmanager
def ignore_closed_event_loops() -> Iterator[None]:
    """Drop the tracebacks of TensorStore's threads that still report to the event loop of a
    failed save.
    """
    previous = sys.unraisablehook

    def report(unraisable: Any) -> None:
        error = unraisable.exc_value
        if not (isinstance(error, RuntimeError) and str(error) == "Event loop is closed"):
            previous(unraisable)

    # TensorStore calls back in threads of its own, where no `except` can be
    sys.unraisablehook = report
    try:
        yield
    finally:
        sys.unraisablehook = previous
