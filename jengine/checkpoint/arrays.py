"""Array storage with Orbax. No other module calls Orbax's functions for arrays.

Typed PRNG keys are stored as raw data and become keys again where the target has keys. Arrays on
disk are addressed by dotted path (`opt_state.1.0.mu.kernel`), so a NamedTuple, a dict and a
dataclass with the same names are equivalent.
"""

import contextlib
import functools
import hashlib
import logging
import os
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from jengine.checkpoint.progress import wait_for_processes
from jengine.config.errors import ConfigError
from jengine.config.paths import dotted, flatten, map_with_path, unwrap
from jengine.config.plugins import load_each
from jengine.config.storage import StorageError, find_scheme, is_url, read_bytes
from jengine.parallel.processes import put_whole

_EMPTY = re.compile(r"empty:(\w+):(\d+(?:x\d+)*)")
# Orbax puts paths into patterns of globs, and TensorStore takes a backslash for a slash
_SPECIAL = re.compile(r"[*?\[\]\\]")
_ATTEMPTS = 5  # of a read
_UNLIMITED = 10**9  # seconds; Orbax requires a limit, and `wait_for_processes` has a better one


def is_key(leaf: Any) -> bool:
    """Return whether `leaf` is an array with typed PRNG keys, or its ShapeDtypeStruct.

    >>> is_key(jax.random.key(0)), is_key(np.zeros(2))
    (True, False)
    """
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def encode(state: Any, *, alone: bool = False) -> Any:
    """Convert a state to arrays that Orbax can store.

    Args:
      state: pytree with arrays, typed PRNG keys and numbers.
      alone: for `BackgroundWriter(alone=True)`.

    Returns:
      The pytree to write. Arrays in host memory are copied, so the next step may overwrite them
      during the write.

    Raises:
      TypeError: a leaf is neither an array nor a number. ValueError: see `check_storable`; or a
        leaf was donated to a step that did not return.
    """
    check_storable(state)  # before anything is copied
    encode_leaf = functools.partial(_encode_leaf, alone=alone)
    # Orbax uses the same paths as `flatten` then
    storable = jax.tree.map(
        functools.partial(_replace_empty, alone=alone), unwrap(map_with_path(encode_leaf, state))
    )
    # Orbax copies the arrays on other devices before its `save` returns. On one CPU, NumPy arrays
    # are written faster.
    in_memory = _in_host_memory(storable)
    return jax.tree.map(
        lambda x: np.array(x) if in_memory or isinstance(x, np.ndarray) else x, storable
    )


def check_storable(state: Any) -> None:
    """Check paths, shapes and dtypes before a run starts, so the first save will not fail.

    Args:
      state: pytree with arrays, `jax.ShapeDtypeStruct`s, typed PRNG keys and numbers.

    Raises:
      ConfigError: a leaf has a dtype that TensorStore lacks, or two leaves have the same dotted
        path.

    >>> check_storable({"a": {"b": 1}, "a.b": 2})
    Traceback (most recent call last):
    jengine.config.errors.ConfigError: two arrays of the state have the same dotted path; use names
    without dots
    """
    leaves = flatten(state)
    # The store is flat: the second array with a path would overwrite the first.
    if len(leaves) != len(jax.tree.leaves(state)):
        raise ConfigError(
            "two arrays of the state have the same dotted path; use names without dots"
        )
    for path, leaf in leaves.items():
        # Without this check the first save would fail, after an epoch.
        if hasattr(leaf, "dtype") and not is_key(leaf) and not _is_storable(np.dtype(leaf.dtype)):
            raise ConfigError(
                f"`{path}` must have a dtype that checkpoints can store, got {leaf.dtype}; store "
                "the values as another dtype, such as int8, and convert them in the model"
            )


def _is_storable(dtype: np.dtype) -> bool:
    # Built-in dtypes are known to be fine; tensorstore, which takes a while to import, is asked
    # only about the others.
    if dtype.isbuiltin != 1 and dtype.name != "bfloat16":
        import tensorstore

        try:
            tensorstore.dtype(dtype.name)
        except ValueError:
            return False
    return True


def _encode_leaf(path: str, leaf: Any, alone: bool) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"cannot save `{path}`: its buffer was donated to a step that did not finish; "
                "the last checkpoint before that step is the newest valid state"
            )
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf  # TensorStore has no PRNG keys
        if jax.process_count() > 1 and leaf.is_fully_addressable and not alone:
            leaf = np.asarray(leaf)  # each process has an equal copy; Orbax writes the first one's
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        leaf = np.asarray(leaf)
        if alone and jax.process_count() > 1:  # Orbax has only the first process write NumPy arrays
            leaf = jax.device_put(leaf, jax.local_devices()[0])
    else:
        raise TypeError(
            f"`{path}` must be an array, got {type(leaf).__name__}; store other values in `meta`"
        )
    return leaf


def _replace_empty(leaf: jax.Array | np.ndarray, alone: bool) -> Any:
    """Return an array; for one without elements, which TensorStore cannot write, a byte with its
    shape in its name.
    """
    if leaf.size:
        return leaf
    name = f"empty:{leaf.dtype.name}:{'x'.join(map(str, leaf.shape))}"
    return {name: _encode_leaf(name, np.zeros(1, bool), alone)}


def _find_empty(node: Any) -> jax.ShapeDtypeStruct | None:
    """Return the array for which `_replace_empty` has stored the node of a tree on disk.

    None for other nodes.
    """
    if not isinstance(node, Mapping) or len(node) != 1:
        return None
    found = _EMPTY.fullmatch(str(next(iter(node))))
    shape = tuple(map(int, found[2].split("x"))) if found else ()
    # Only without elements: a file must not allocate memory by the name of an array.
    return jax.ShapeDtypeStruct(shape, jnp.dtype(found[1])) if found and 0 in shape else None


def _in_host_memory(state: Any) -> bool:
    """Return whether a single CPU holds all arrays."""
    devices = {
        device
        for leaf in jax.tree.leaves(state)
        if isinstance(leaf, jax.Array)
        for device in leaf.devices()
    }
    return (
        jax.process_count() == 1
        and len(devices) <= 1
        and all(device.platform == "cpu" for device in devices)
    )


def to_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the stored shape, dtype and sharding; a typed key is stored as raw data."""
    if is_key(leaf):
        # Keys are stored as their uint32 data: a checkpoint must not depend on how JAX represents a
        # key.
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(
            data.shape, data.dtype, sharding=getattr(leaf, "sharding", None)
        )
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def decode_leaf(stored: Any, target: Any) -> Any:
    """Convert a stored array to PRNG keys if `target` has typed keys.

    Return it unchanged otherwise.
    """
    if not is_key(target):
        return stored
    impl: list[Any] = []  # without an array, JAX only tells it under a trace
    jax.eval_shape(
        lambda key: impl.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), target.dtype)
    )
    return jax.random.wrap_key_data(stored, impl=impl[0])


def put_like(array: Any, like: Any) -> Any:
    """Return `array` with the dtype and devices of `like`.

    A NumPy array if `like` has no sharding.
    """
    struct = to_struct(like)
    array = array.astype(struct.dtype, copy=False)
    placed: np.ndarray | jax.Array = array
    if struct.sharding is None:
        placed = np.asarray(array)
    else:
        placed = put_whole(array, struct.sharding)
    return decode_leaf(placed, like)


def read_structs(directory: PurePath) -> Any:
    """Return the tree on disk with a ShapeDtypeStruct for each array, without reading arrays.

    A string, which other training loops may store, has the dtype object.
    """

    def replace(node: Any) -> Any:
        return node if (empty := _find_empty(node)) is None else empty

    return jax.tree.map(
        replace, _read_stored_structs(directory), is_leaf=lambda node: _find_empty(node) is not None
    )


def _read_stored_structs(directory: PurePath) -> Any:
    text = jax.ShapeDtypeStruct((), np.dtype(object))
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else text,
        _find_metadata(directory),
    )


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


def _find_metadata(directory: PurePath) -> Any:
    version = b""
    local = _find_local(directory)
    if is_url(local):
        # of arrays that are not in Orbax's OCDBT format
        with contextlib.suppress(FileNotFoundError):
            version = read_bytes(local / "manifest.ocdbt")  # each save has another
    return _read_cached_metadata(os.fspath(local), version) if version else _read_metadata(local)


def _read_metadata(directory: str | PurePath) -> Any:
    """Return what Orbax knows of each array."""

    def read() -> Any:
        with _make_reader() as reader:
            return reader.metadata(epath.Path(directory)).tree

    return _retry(directory, read)


def _retry(directory: str | PurePath, read: Callable[[], Any]) -> Any:
    """Return what `read` returns, which is tried again: TensorStore has no type for an answer
    that was cut off.
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


@functools.lru_cache(maxsize=1)
def _read_cached_metadata(directory: str, version: bytes) -> Any:
    return _read_metadata(directory)  # seven requests, which a resume would repeat three times


def read(directory: PurePath, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Read arrays from disk, in this process alone.

    Args:
      directory: the `state` directory in a checkpoint.
      structs: the arrays to read by dotted path. One with a sharding becomes a JAX array with that
        sharding, others become NumPy arrays.

    Returns:
      The tree on disk; Ellipsis takes the place of arrays that were not requested.
    """
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

    local = _find_local(directory, arrays=True)
    tree = _read_stored_structs(local)  # Orbax wants the whole tree, not only what is read
    item = map_with_path(lambda path, leaf: structs.get(path, ocp.PLACEHOLDER), tree)
    args = ocp.args.PyTreeRestore(item=item, restore_args=map_with_path(restore_args, tree))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    # Without a limit, Orbax holds two copies of most arrays. The largest array must fit into the
    # limit.
    with _make_reader(max_bytes_in_flight=max(2 * max(sizes), sum(sizes) // 10)) as reader:
        stored = _retry(local, lambda: reader.restore(epath.Path(local), args=args))

    def fill(path: Any, node: Any) -> Any:
        if _find_empty(node) is None:
            return node
        struct = structs.get(dotted(path))
        return (
            ocp.PLACEHOLDER
            if struct is None
            else put_like(np.zeros(struct.shape, struct.dtype), struct)
        )

    return jax.tree_util.tree_map_with_path(
        fill, stored, is_leaf=lambda node: _find_empty(node) is not None
    )


class WrittenArrays:
    """What was written, to be compared with what can be read before a checkpoint counts.

    Args:
      state: the state that `encode` returned.
      with_values: whether to read the smallest array too, as the first save of a run does: at a
        path or on a file system that Orbax cannot read, no checkpoint could be read.
    """

    def __init__(self, state: Any, *, with_values: bool) -> None:
        leaves = flatten(state)
        self._structs = {
            path: (tuple(leaf.shape), np.dtype(leaf.dtype)) for path, leaf in leaves.items()
        }
        whole = {
            path: leaf
            for path, leaf in leaves.items()
            if getattr(leaf, "is_fully_addressable", True) and not _EMPTY.search(path)
        }
        smallest = min(whole, key=lambda path: whole[path].size) if with_values and whole else None
        self._values = {} if smallest is None else {smallest: np.asarray(whole[smallest])}

    def compare(self, directory: PurePath) -> None:
        """Raise StorageError unless Orbax can read from `directory` what was written."""
        scheme = find_scheme(directory)
        if scheme is not None and scheme.is_staged and not self._values:
            return  # the upload has compared the bytes
        try:
            found = {
                path: (leaf.shape, leaf.dtype)
                for path, leaf in flatten(_read_stored_structs(directory)).items()
            }
            if found != self._structs:
                others = sorted(
                    path
                    for path in {*found, *self._structs}
                    if found.get(path) != self._structs.get(path)
                )
                raise StorageError(
                    f"{others[0]} is {found.get(others[0])}, not {self._structs.get(others[0])}"
                )
            for path, value in self._values.items():
                read_back = read_flat(
                    directory, {path: jax.ShapeDtypeStruct(value.shape, value.dtype)}
                )[path]
                if read_back.tobytes() != value.tobytes():
                    raise StorageError(f"{path} has other values")
        except Exception as error:  # of any type, from Orbax or TensorStore
            raise StorageError(
                f"what was written to {directory} cannot be read: {error}"
            ) from error
        finally:
            if scheme is not None and self._values:
                scheme.remove_copy()


def read_flat(directory: PurePath, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Read arrays from disk into a flat dict by dotted path; see `read`.

    If a sharding has devices of several processes, all of them call this together: with an extra
    for it, what more than one needs is read by one of them.
    """
    if jax.process_count() > 1:
        for read_shared in load_each("shared_reads"):
            return dict(read_shared(directory, structs))
    return read_own(directory, structs)


def read_own(directory: PurePath, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Read arrays as `read_flat`, without other processes."""
    tree = read(directory, structs) if structs else {}
    leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
    return {name: leaf for path, leaf in leaves if (name := dotted(path)) in structs}


def read_chunk_shapes(directory: PurePath) -> dict[str, Sequence[int] | None]:
    """Return the shape of the chunks in which each array is stored, None where it is not known."""
    storage = {
        path: getattr(leaf, "storage", None)
        for path, leaf in flatten(_find_metadata(directory)).items()
    }
    return {path: found and found.chunk_shape for path, found in storage.items()}


class BackgroundWriter:
    """Writer for one state at a time. A write starts in one thread and finishes in another.

    Args:
      alone: whether each of several processes writes all that its devices hold, to a directory of
        its own.
    """

    def __init__(self, alone: bool = False) -> None:
        self._alone = alone and jax.process_count() > 1
        self._orbax: Any = None
        self._directory: PurePath | None = None

    def start(
        self, directory: PurePath, state: Any, prepare: Callable[[], None] = lambda: None
    ) -> Callable[[], None]:
        """Start to write a state that `encode` returned; device arrays may be donated afterwards.

        `directory` must not exist. `prepare` is called before anything is written, if possible by
        the function that is returned.

        Returns:
          A function that finishes the write and raises any error; call it once, in any thread.
        """
        scheme = find_scheme(directory)
        if scheme is not None and scheme.is_staged:
            return scheme.upload_after(lambda local: self.start(local, state), directory, prepare)
        if _in_host_memory(state):
            # `pop` takes the last reference, so the copy is freed when the write is done. This path
            # also imports Orbax in the background.
            copies = [state]

            def write() -> None:
                prepare()
                write_from_process(directory, copies.pop())

            return write
        prepare()
        import orbax.checkpoint as ocp

        if self._orbax is None:
            _silence_orbax()
            # Given the processes, Orbax synchronizes them on the host. By default it runs a
            # collective on the devices; from a second thread, its order among the collectives of
            # the steps would differ between processes.
            options = ocp.options.MultiprocessingOptions(
                active_processes=set(range(jax.process_count()))
                if jax.process_count() > 1
                else None
            )
            if self._alone:
                # of barriers with itself, beside those of all processes
                prefix = f"local_{jax.process_index()}"
                options = _single_process_options(primary_host=None, barrier_sync_key_prefix=prefix)
            waits = ocp.options.AsyncOptions(
                timeout_secs=_UNLIMITED,
                barrier_sync_fn=lambda key, timeout_ms: self._wait(key),
                # Orbax has one set of signals for this, which each process removes after its save:
                # one that writes alone would wait forever for those that another has removed.
                create_directories_asynchronously=not self._alone,
            )
            handler = _make_handler(options, all_shards=self._alone)
            self._orbax = ocp.AsyncCheckpointer(
                handler, multiprocessing_options=options, async_options=waits
            )
        # Orbax's own barriers in `save` end after 300 s, which cannot be set: so none of the
        # processes may be late.
        self._wait("start of a save")
        self._directory = directory
        self._orbax.save(epath.Path(_make_plain(directory)), args=ocp.args.PyTreeSave(state))
        finish: Callable[[], None] = self._orbax.wait_until_finished
        return finish

    def _wait(self, name: str) -> None:
        if not self._alone:
            wait_for_processes(name, self._directory)

    def close(self) -> None:
        """Stop the background threads."""
        if self._orbax is not None:
            self._orbax.close()
            self._orbax = None


def write_from_process(directory: PurePath, state: Any) -> None:
    """Write the arrays that this process holds, without waiting for other processes.

    The write is not atomic, so the caller should write to a temporary directory and rename it. An
    Orbax checkpointer would be atomic, but is slower.
    """
    import orbax.checkpoint as ocp

    scheme = find_scheme(directory)
    if scheme is not None and scheme.is_staged:
        scheme.upload_after(lambda local: lambda: write_from_process(local, state), directory)()
        return
    _silence_orbax()
    directory = _make_plain(directory)
    handler = _make_handler(_single_process_options())
    if not is_url(directory):
        Path(directory).mkdir(parents=True)  # the handler does not create it
    handler.save(epath.Path(directory), args=ocp.args.PyTreeSave(state))
    handler.finalize(epath.Path(directory))  # merges the index of the arrays


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


@contextlib.contextmanager
def _make_reader(max_bytes_in_flight: int | None = None) -> Iterator[Any]:
    """Return Orbax's handler alone: a Checkpointer would look for the files of its own commits,
    with many requests.
    """
    _silence_orbax()
    options = _single_process_options()  # each process reads alone, at a time of its choice
    limit = None if max_bytes_in_flight is None else max_bytes_in_flight / 1e9
    with contextlib.closing(_make_handler(options, restore_concurrent_gb=limit)) as handler:
        yield handler


def _make_handler(options: Any, all_shards: bool = False, **settings: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(
        # trained weights hardly shrink, and compression steals cores from the next step
        use_compression=False,
        type_handler_registry=_type_handlers(all_shards),
        multiprocessing_options=options,
        **settings,
    )


def _single_process_options(**settings: Any) -> Any:
    # With the default options, Orbax would wait for the other processes forever.
    import orbax.checkpoint as ocp

    index = jax.process_index()
    active = {index} if jax.process_count() > 1 else None
    return ocp.options.MultiprocessingOptions(
        **{"primary_host": index, "active_processes": active, **settings}
    )


@functools.cache
def _type_handlers(all_shards: bool) -> Any:
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    # each process writes, also what others hold as well
    local = dict(primary_host=None, replica_id=None)
    # By default Orbax cuts a replicated array into one slice per replica. That compiles a program
    # for each array and blocks the first save for seconds.
    return handlers.create_type_handler_registry(
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),  # `encode` copied them
        (
            jax.Array,
            handlers.ArrayHandler(use_replica_parallel=False, **(local if all_shards else {})),
        ),
        # Only in the checkpoints of other loops:
        *((kind, handlers.ScalarHandler()) for kind in (int, float, bytes, np.number)),
        (str, handlers.StringHandler()),
    )


@functools.cache
def _silence_orbax() -> None:
    # Orbax logs every step through absl's root logger; failures reach the caller as exceptions.
    logging.getLogger("absl").addFilter(
        lambda record: "/orbax/" not in record.pathname.replace("\\", "/")
    )
