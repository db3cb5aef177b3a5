"""Arrays to disk and back, through Orbax: the only module that knows its interface.

Typed PRNG keys are stored as their data and become keys again where the target has keys. What is on disk is known by
dotted path (`opt_state.1.0.mu.kernel`), so that a NamedTuple, a dict and a dataclass with equal names are the same.
"""

import functools
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.paths import dotted, flatten, map_with_path, unwrap

_SMALL = 2**22  # bytes; up to this size a state is written as NumPy arrays, each of which costs Orbax less time
_ALIGNMENT = 64  # bytes; JAX uses NumPy memory with this alignment without a copy


def is_key(leaf: Any) -> bool:
    """Return whether `leaf` is an array of typed PRNG keys, or a ShapeDtypeStruct of one."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def encode(state: Any) -> Any:
    """Convert a state to what Orbax can store: every leaf an array with at least one element, no typed keys.

    A state in the memory of one CPU is copied, so that the next step may overwrite it while the copy is written.

    Args:
      state: pytree of arrays, typed PRNG keys and numbers.

    Returns:
      The pytree of NumPy and JAX arrays to write.

    Raises:
      TypeError: a leaf is neither an array nor a number. ValueError: a leaf is empty, or its buffer was donated to a
        step that did not return, or two leaves have the same dotted path.
    """
    if len(flatten(state)) != len(jax.tree.leaves(state)):
        raise ValueError("two arrays of the state have the same dotted path: use names without dots")
    storable = unwrap(map_with_path(_storable, state))  # on disk the paths are those of `flatten`
    if not _in_host_memory(storable):
        # Orbax copies the arrays of other devices before its `save` returns.
        return jax.tree.map(lambda leaf: np.array(leaf) if isinstance(leaf, np.ndarray) else leaf, storable)
    leaves, structure = jax.tree.flatten(storable)
    copies: list[Any] = _copy(leaves)
    if sum(leaf.nbytes for leaf in leaves) > _SMALL:
        copies = [
            jax.device_put(copy, leaf.sharding) if isinstance(leaf, jax.Array) else copy
            for copy, leaf in zip(copies, leaves, strict=True)
        ]
    return jax.tree.unflatten(structure, copies)


def _copy(arrays: Sequence[jax.Array | np.ndarray]) -> list[np.ndarray]:
    """Copy arrays from host memory into one new buffer.

    The kernel backs a large buffer with large pages. With a buffer for each array, page faults take longer than the
    copy itself.
    """
    starts = list(itertools.accumulate((-(-array.nbytes // _ALIGNMENT) * _ALIGNMENT for array in arrays), initial=0))
    buffer = np.empty(starts.pop() + _ALIGNMENT, np.uint8)
    first = -buffer.ctypes.data % _ALIGNMENT
    copies = []
    for array, start in zip(arrays, starts, strict=True):
        copy: np.ndarray = np.ndarray(array.shape, array.dtype, buffer, first + start)
        np.copyto(copy, array)
        copies.append(copy)
    return copies


def _storable(path: str, leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{path} cannot be saved: its buffer was donated to a step that did not finish; "
                "the last checkpoint before that step is the newest valid state"
            )
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            leaf = np.asarray(leaf)  # every process has its own, equal array: the first one's is written
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        leaf = np.asarray(leaf)
    else:
        raise TypeError(f"{path} is a {type(leaf).__name__}: a train state holds arrays; keep the rest in the meta")
    if leaf.size == 0:
        raise ValueError(f"{path} has no elements (shape {tuple(leaf.shape)}), which cannot be stored; leave it out")
    return leaf


def _in_host_memory(state: Any) -> bool:
    """Return whether each array is whole in the memory of one CPU of this process."""
    devices = {device for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array) for device in leaf.devices()}
    return jax.process_count() == 1 and len(devices) <= 1 and all(device.platform == "cpu" for device in devices)


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Return the shape, dtype and sharding with which `leaf` is stored; for a typed key, those of its data."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=getattr(leaf, "sharding", None))
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def rewrap(target: Any, stored: Any) -> Any:
    """Convert a stored array to the kind of leaf that `target` is: PRNG keys from their data."""
    if not is_key(target):
        return stored
    impl: list[Any] = []  # of a ShapeDtypeStruct it is known under a trace only
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), target.dtype))
    return jax.random.wrap_key_data(stored, impl=impl[0])


def stored_tree(directory: Path) -> Any:
    """Return the nested dicts and lists on disk with a ShapeDtypeStruct for each array, without reading arrays."""
    with _reader() as reader:
        metadata = reader.metadata(directory).item_metadata.tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), metadata)


def read(directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Read some of the arrays on disk.

    Args:
      directory: the `state` directory of a checkpoint.
      wanted: by dotted path; a struct with a sharding gives a JAX array with it, one without gives a NumPy array.

    Returns:
      The tree on disk with the arrays wanted; Ellipsis in the place of the others.
    """
    import orbax.checkpoint as ocp

    def restore_args(path: str, _: Any) -> Any:
        """Return how Orbax reads the array at `path`."""
        leaf = wanted.get(path)
        if leaf is None:
            return ocp.RestoreArgs()
        if leaf.sharding is None:
            return ocp.RestoreArgs(restore_type=np.ndarray, dtype=leaf.dtype)
        return ocp.ArrayRestoreArgs(sharding=leaf.sharding, dtype=leaf.dtype, global_shape=leaf.shape)

    tree = stored_tree(directory)
    item = map_with_path(lambda path, leaf: wanted.get(path, ocp.PLACEHOLDER), tree)
    args = ocp.args.PyTreeRestore(item=item, restore_args=map_with_path(restore_args, tree))
    sizes = [leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree)]
    # Unlimited, Orbax holds most of what it reads twice. One array alone must stay below the limit.
    with _reader(in_flight=max(2 * max(sizes), sum(sizes) // 10)) as reader:
        return reader.restore(directory, args=args)


def read_flat(directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Read some of the arrays on disk into a flat dict by dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(read(directory, wanted))[0]
    return {name: leaf for path, leaf in leaves if (name := dotted(path)) in wanted}


class BackgroundWriter:
    """Write states, one at a time: a write starts in one thread and ends in another."""

    def __init__(self) -> None:
        self._orbax: Any = None

    def begin(self, directory: Path, state: Any) -> Callable[[], None]:
        """Start to write a state that `encode` returned. Its arrays on devices may be donated once this returns.

        Returns:
          A function that finishes the write, to be called once and in any thread; it raises what went wrong.
        """
        if _in_host_memory(state):
            # The write takes the only reference, so that no copy is left when the save is over. It also imports Orbax
            # in the background.
            copies = [state]
            return lambda: write_alone(directory, copies.pop())
        import orbax.checkpoint as ocp

        if self._orbax is None:
            _silence_orbax()
            # With the processes named, Orbax lets them wait for each other on the host. By default it takes a
            # collective of the devices, which in another thread than the steps' gets into a different order among
            # these on each process.
            together = ocp.options.MultiprocessingOptions(active_processes=all_processes())
            self._orbax = ocp.AsyncCheckpointer(_handler(together), multiprocessing_options=together)
        self._orbax.save(directory, args=ocp.args.PyTreeSave(state))
        end: Callable[[], None] = self._orbax.wait_until_finished
        return end

    def close(self) -> None:
        """End the background threads."""
        if self._orbax is not None:
            self._orbax.close()


def all_processes() -> set[int] | None:
    """Return the indices of all processes for Orbax's options, None for a single process."""
    return set(range(jax.process_count())) if jax.process_count() > 1 else None


def write_alone(directory: Path, state: Any) -> None:
    """Write the arrays of this process, without waiting for other processes.

    The directory gets its final name at once: the caller must make it appear whole. An Orbax checkpointer would do
    that too, but takes longer.
    """
    import orbax.checkpoint as ocp

    _silence_orbax()
    handler = _handler(_by_itself())
    directory.mkdir(parents=True)
    handler.save(directory, args=ocp.args.PyTreeSave(state))
    handler.finalize(directory)


def _reader(in_flight: int | None = None) -> Any:
    """Return an Orbax checkpointer for reading, with at most `in_flight` bytes at a time."""
    import orbax.checkpoint as ocp

    _silence_orbax()
    alone = _by_itself()
    handler = _handler(alone, restore_concurrent_gb=None if in_flight is None else in_flight / 1e9)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _handler(processes: Any, **settings: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(
        use_compression=False,  # trained weights hardly shrink, and compressing them takes the cores from the next step
        type_handler_registry=_type_handlers(),
        multiprocessing_options=processes,
        **settings,
    )


def _by_itself() -> Any:
    """Return Orbax options for a process that waits for no other: by default, reading alone waits forever."""
    import orbax.checkpoint as ocp

    me = jax.process_index()
    return ocp.options.MultiprocessingOptions(
        primary_host=me, active_processes={me} if jax.process_count() > 1 else None
    )


@functools.cache
def _type_handlers() -> Any:
    import orbax.checkpoint as ocp

    handlers = ocp.type_handlers
    # By default replicated arrays are cut into one slice per replica, which compiles once per array: seconds of
    # blocking at the first save, measured on eight devices.
    return handlers.create_type_handler_registry(
        (np.ndarray, handlers.NumpyHandler(deepcopy_host_arrays=False)),  # `encode` has copied them
        (jax.Array, handlers.ArrayHandler(use_replica_parallel=False)),
    )


@functools.cache
def _silence_orbax() -> None:
    # Orbax narrates through absl's root logger; failures reach the caller as exceptions.
    logging.getLogger("absl").addFilter(lambda record: "/orbax/" not in record.pathname.replace("\\", "/"))
