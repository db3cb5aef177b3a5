"""Write arrays to disk with Orbax and read them back. Only this module calls Orbax's functions for arrays.

Typed PRNG keys are stored as their data and become keys again where the target has keys. Arrays on disk are addressed
by dotted path (`opt_state.1.0.mu.kernel`), so a NamedTuple, a dict and a dataclass with the same names are equivalent.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.checkpoint.progress import wait_for_processes
from jengine.errors import ConfigError
from jengine.paths import dotted, flatten, map_with_path, unwrap

_SMALL = 2**22  # bytes; up to this size a state is written as NumPy arrays, which Orbax handles faster
_UNLIMITED = 10**9  # seconds; Orbax requires a limit, and `wait_for_processes` has a better one
_ALIGNMENT = 64  # bytes; JAX can use NumPy memory with this alignment without copying it


def is_key(leaf: Any) -> bool:
    """Return whether `leaf` is an array of typed PRNG keys, or a ShapeDtypeStruct of one."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def encode(state: Any) -> Any:
    """Convert a state to arrays that Orbax can store: none of them empty, no typed keys.

    A state in the memory of a single CPU is copied, so that the next step may overwrite it during the write.

    Args:
      state: pytree of arrays, typed PRNG keys and numbers.

    Returns:
      The pytree of NumPy and JAX arrays to write.

    Raises:
      TypeError: a leaf is neither an array nor a number. ValueError: see `check_storable`; or the buffer of a leaf was
        donated to a step that did not return.
    """
    check_storable(state)
    storable = unwrap(map_with_path(_encode_leaf, state))  # Orbax then uses the same paths as `flatten`
    if not _in_host_memory(storable):
        # Orbax copies the arrays of other devices before its `save` returns.
        return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, storable)
    leaves, structure = jax.tree.flatten(storable)
    copies: list[Any] = _copy_to_one_buffer(leaves)
    if sum(leaf.nbytes for leaf in leaves) > _SMALL:
        copies = [
            jax.device_put(copy, leaf.sharding) if isinstance(leaf, jax.Array) else copy
            for copy, leaf in zip(copies, leaves, strict=True)
        ]
    return jax.tree.unflatten(structure, copies)


def check_storable(state: Any) -> None:
    """Check that a state can be stored, by its paths, shapes and dtypes alone.

    Args:
      state: pytree of arrays, `jax.ShapeDtypeStruct`s, typed PRNG keys and numbers.

    Raises:
      ConfigError: a leaf is empty or has a dtype that TensorStore lacks, or two leaves have the same dotted path.
    """
    leaves = flatten(state)
    if len(leaves) != len(jax.tree.leaves(state)):
        raise ConfigError("two arrays of the state have the same dotted path; use names without dots")
    for path, leaf in leaves.items():
        if 0 in getattr(leaf, "shape", ()):
            raise ConfigError(f"`{path}` must have at least one element, got shape {tuple(leaf.shape)}; leave it out")
        if hasattr(leaf, "dtype") and not is_key(leaf) and not _is_storable(np.dtype(leaf.dtype)):
            raise ConfigError(
                f"`{path}` must have a dtype that checkpoints can store, got {leaf.dtype}; store the values as "
                "another dtype, such as int8, and convert them in the model"
            )


def _is_storable(dtype: np.dtype) -> bool:
    if dtype.isbuiltin == 1 or dtype.name == "bfloat16":
        return True
    import tensorstore

    try:
        tensorstore.dtype(dtype.name)
    except ValueError:
        return False
    return True


def _copy_to_one_buffer(arrays: Sequence[jax.Array | np.ndarray]) -> list[np.ndarray]:
    """Copy arrays from host memory into one new buffer.

    The kernel backs a large buffer with large pages. With one buffer per array, page faults would take longer than the
    copy itself.
    """
    starts = list(itertools.accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0))
    buffer = np.empty(starts.pop() + _ALIGNMENT, np.uint8)
    offset = -buffer.ctypes.data % _ALIGNMENT
    copies = []
    for array, start in zip(arrays, starts, strict=True):
        copy: np.ndarray = np.ndarray(array.shape, array.dtype, buffer, offset + start)
        np.copyto(copy, array)
        copies.append(copy)
    return copies


def _encode_leaf(path: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"cannot save `{path}`: its buffer was donated to a step that did not finish; "
                "the last checkpoint before that step is the newest valid state"
            )
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            leaf = np.asarray(leaf)  # each process has an equal copy; Orbax writes that of the first
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        leaf = np.asarray(leaf)
    else:
        raise TypeError(f"`{path}` must be an array, got {type(leaf).__name__}; store other values in `meta`")
    return leaf


def _in_host_memory(state: Any) -> bool:
    """Return whether all arrays are in the memory of a single CPU of this process."""
    devices = {device for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return jax.process_count() == 1 and len(devices) <= 1 and all(device.platform == "cpu" for device in devices)


def to_struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding with which `leaf` is stored; for a typed key, those of its data."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=getattr(leaf, "sharding", None))
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def decode_leaf(stored: Any, target: Any) -> Any:
    """Convert a stored array to PRNG keys if `target` has typed keys; return it unchanged otherwise."""
    if not is_key(target):
        return stored
    impl: list[Any] = []  # of a ShapeDtypeStruct, it is only available under a trace
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), target.dtype))
    return jax.random.wrap_key_data(stored, impl=impl[0])


def read_structs(directory: Path) -> Any:
    """Return the nested dicts and lists on disk with a ShapeDtypeStruct for each array, without reading arrays.

    A string, which other loops may store, has the dtype object.
    """
    with _make_reader() as reader:
        metadata = reader.metadata(directory).item_metadata.tree
    text = jax.ShapeDtypeStruct((), np.dtype(object))
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if hasattr(x, "dtype") else text, metadata)


def read(directory: Path, structs: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Read some of the arrays on disk.

    Args:
      directory: the `state` directory of a checkpoint.
      structs: the arrays to read, by dotted path; with a sharding, the result is a JAX array with that sharding,
        otherwise a NumPy array.

    Returns:
      The tree on disk with the requested arrays, and Ellipsis instead of the others.
    """
    import orbax.checkpoint as ocp

    def restore_args(path: str, _: Any) -> Any:
        """Return Orbax's settings for reading the array at `path`."""
        leaf = structs.get(path)
        if leaf is None:
            return ocp.RestoreArgs()
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape)

    tree = read_structs(directory)
    item = map_with_path(lambda path, leaf: structs.get(path, ocp.PLACEHOLDER), tree)
    args = ocp.args.PyTreeRestore(item=item, restore_args=map_with_path(restore_args, tree))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    # Without a limit, Orbax holds two copies of most arrays. The largest array must fit into the limit.
    with _make_reader(max_bytes_in_flight=max(2 * max(sizes), sum(sizes) // 10)) as reader:
        return reader.restore(directory, args=args)


def read_flat(directory: Path, structs: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Read some of the arrays on disk into a flat dict by dotted path; `structs` as in `read`."""
    leaves = jax.tree_util.tree_flatten_with_path(read(directory, structs))[0]
    return {name: leaf for path, leaf in leaves if (name := dotted(path)) in structs}


class BackgroundWriter:
    """Write one state at a time. A write starts in one thread and finishes in another."""

    def __init__(self) -> None:
        self._orbax: Any = None
        self._directory: Path | None = None

    def start(self, directory: Path, state: Any) -> Callable[[], None]:
        """Start to write a state that `encode` returned. Its arrays on devices may be donated once this returns.

        Returns:
          A function that finishes the write and raises its errors; call it once, in any thread.
        """
        if _in_host_memory(state):
            # `pop` takes the last reference, so that the copy is freed when the write is done. This path also imports
            # Orbax in the background.
            copies = [state]
            return lambda: write_from_process(directory, copies.pop())
        import orbax.checkpoint as ocp

        if self._orbax is None:
            _silence_orbax()
            # Given the processes, Orbax synchronizes them on the host. By default it runs a collective on the devices;
            # from a second thread, its order among the collectives of the steps would differ between processes.
            options = ocp.options.MultiprocessingOptions(active_processes=process_indices())
            waits = ocp.options.AsyncOptions(
                timeout_secs=_UNLIMITED,
                barrier_sync_fn=lambda key, timeout_ms: wait_for_processes(key, self._directory),
            )
            self._orbax = ocp.AsyncCheckpointer(
                _make_handler(options), multiprocessing_options=options, async_options=waits
            )
        # Orbax's own barriers in `save` end after 300 s, which cannot be set: so none of the processes may be late.
        wait_for_processes("start of a save")
        self._directory = directory
        self._orbax.save(directory, args=ocp.args.PyTreeSave(state))
        finish: Callable[[], None] = self._orbax.wait_until_finished
        return finish

    def close(self) -> None:
        """Stop the background threads."""
        if self._orbax is not None:
            self._orbax.close()


def process_indices() -> set[int] | None:
    """Return the indices of all processes for Orbax's options, None for a single process."""
    return set(range(jax.process_count())) if jax.process_count() > 1 else None


def write_from_process(directory: Path, state: Any) -> None:
    """Write the arrays of this process, without waiting for other processes.

    The write is not atomic: the caller writes to a temporary directory and renames it. An Orbax checkpointer would be
    atomic, but is slower.
    """
    import orbax.checkpoint as ocp

    _silence_orbax()
    handler = _make_handler(_single_process_options())
    directory.mkdir(parents=True)
    handler.save(directory, args=ocp.args.PyTreeSave(state))
    handler.finalize(directory)


def _make_reader(max_bytes_in_flight: int | None = None) -> Any:
    """Return an Orbax checkpointer for reading, with at most `max_bytes_in_flight` at a time."""
    import orbax.checkpoint as ocp

    _silence_orbax()
    options = _single_process_options()
    limit = None if max_bytes_in_flight is None else max_bytes_in_flight / 1e9
    return ocp.Checkpointer(_make_handler(options, restore_concurrent_gb=limit), multiprocessing_options=options)


def _make_handler(options: Any, **settings: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # trained weights hardly shrink, and compression steals cores from the next step
        type_handler_registry=_type_handlers(),
        multiprocessing_options=options,
        **settings,
    )


def _single_process_options() -> Any:
    """Return Orbax options for a process that works alone; with the defaults it would wait for the others forever."""
    import orbax.checkpoint as ocp

    index = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=index, active_processes={index} if jax.process_count() > 1 else None
    )


@functools.cache
def _type_handlers() -> Any:
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    # By default Orbax cuts a replicated array into one slice per replica. That compiles a program for each array and
    # blocks the first save for seconds.
    return handlers.create_type_handler_registry(
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),  # `encode` copied them
        (jax.Array, handlers.ArrayHandler(use_replica_parallel=False)),
        # Only in the checkpoints of other loops:
        *((kind, handlers.ScalarHandler()) for kind in (int, float, bytes, np.number)),
        (str, handlers.StringHandler()),
    )


@functools.cache
def _silence_orbax() -> None:
    # Orbax logs every step through absl's root logger; failures reach the caller as exceptions.
    logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname.replace("\\", "/"))
