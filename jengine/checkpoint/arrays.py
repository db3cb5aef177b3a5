"""Arrays to disk and back, through Orbax: the only module that knows its interface.

Typed PRNG keys are stored as their data and become keys again where the target has keys. What is on disk is known by
dotted path (`opt_state.1.0.mu.kernel`), so that a NamedTuple, a dict and a dataclass with equal names are the same.
"""

import functools
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jengine.paths import dotted, flatten, map_with_path

_SMALL = 2**22  # bytes of a state up to which a copy takes less time than what Orbax does before it writes


def is_key(leaf: Any) -> bool:
    """Whether `leaf` is an array of typed PRNG keys, or the description of one."""
    return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def encode(state: Any) -> Any:
    """`state` as Orbax can store it: every leaf an array with at least one element, no typed keys.

    Arrays of the host are copied, and those of a small state in its memory, which is then wholly on the host.

    Raises:
      TypeError: a leaf is neither an array nor a number. ValueError: a leaf is empty, or its buffer was donated to a
        step that did not return, or two leaves have the same dotted path.
    """
    leaves = jax.tree.leaves(state)
    if len(flatten(state)) != len(leaves):
        raise ValueError("two arrays of the state have the same dotted path: use names without dots")
    arrays = [leaf for leaf in leaves if isinstance(leaf, jax.Array)]
    copied = sum(array.nbytes for array in arrays) <= _SMALL and all(map(_in_host_memory, arrays))
    return map_with_path(functools.partial(_storable, copied=copied), state)


def _storable(path: str, leaf: Any, copied: bool) -> Any:
    if isinstance(leaf, jax.Array):
        if leaf.is_deleted():
            raise ValueError(
                f"{path} cannot be saved: its buffer was donated to a step that did not finish; "
                "the last checkpoint before that step is the newest valid state"
            )
        leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
        if jax.process_count() > 1 and leaf.is_fully_addressable:
            leaf = np.array(leaf)  # every process has its own, equal copy: the first one's is written
        elif copied:
            leaf = np.array(leaf)
    elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
        leaf = np.array(leaf)
    else:
        raise TypeError(f"{path} is a {type(leaf).__name__}: a train state holds arrays; keep the rest in the meta")
    if leaf.size == 0:
        raise ValueError(f"{path} has no elements (shape {tuple(leaf.shape)}), which cannot be stored; leave it out")
    return leaf


def _in_host_memory(array: jax.Array) -> bool:
    """Whether the array is whole on one CPU."""
    devices: set[jax.Device] = array.sharding.device_set  # `array.devices()` refuses one that was donated
    return array.is_fully_addressable and len(devices) == 1 and next(iter(devices)).platform == "cpu"


def struct(leaf: Any) -> jax.ShapeDtypeStruct:
    """Shape, dtype and sharding under which `leaf` is stored (a typed key: those of its data)."""
    if is_key(leaf):
        data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
        return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=getattr(leaf, "sharding", None))
    if not hasattr(leaf, "dtype"):
        leaf = np.asarray(leaf)
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=getattr(leaf, "sharding", None))


def rewrap(target: Any, stored: Any) -> Any:
    """What was stored, as the kind of leaf that `target` is."""
    if not is_key(target):
        return stored
    impl: list[Any] = []  # of a ShapeDtypeStruct it is known under a trace only
    jax.eval_shape(lambda key: impl.append(jax.random.key_impl(key)), jax.ShapeDtypeStruct((), target.dtype))
    return jax.random.wrap_key_data(stored, impl=impl[0])


def stored_tree(directory: Path) -> Any:
    """The nested dicts and lists on disk, with a ShapeDtypeStruct for each array; reads no array."""
    with _reader() as reader:
        metadata = reader.metadata(directory).item_metadata.tree
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), metadata)


def read(directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> Any:
    """Reads some of the arrays on disk.

    Args:
      directory: what a save wrote.
      wanted: by dotted path; a struct with a sharding gives a JAX array so placed, one without a NumPy array.

    Returns:
      The tree on disk with the arrays wanted; Ellipsis in the place of the others.
    """
    import orbax.checkpoint as ocp

    def restore_args(path: str, _: Any) -> Any:
        """How orbax reads the array at `path`: as it is wanted, or not placed at all."""
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
    with _reader(dispatch_limiter=max(2 * max(sizes), sum(sizes) // 10)) as reader:
        return reader.restore(directory, args=args)


def read_flat(directory: Path, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """`read`, as a flat dict of the arrays wanted by dotted path."""
    leaves = jax.tree_util.tree_flatten_with_path(read(directory, wanted))[0]
    return {name: leaf for path, leaf in leaves if (name := dotted(path)) in wanted}


class BackgroundWriter:
    """Writes states, one at a time: a write begins in one thread and ends in another."""

    def __init__(self) -> None:
        self._orbax: Any = None

    def begin(self, directory: Path, state: Any) -> Callable[[], None]:
        """Begins to write a state, encoded; its arrays on devices may be donated as soon as this returns.

        Returns:
          What ends the write, and raises what went wrong since.
        """
        if jax.process_count() == 1 and all(isinstance(leaf, np.ndarray) for leaf in jax.tree.leaves(state)):
            return functools.partial(write_alone, directory, state)  # there Orbax, too, is imported in the background
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
        """Ends its threads."""
        if self._orbax is not None:
            self._orbax.close()


def all_processes() -> set[int] | None:
    """The processes of the run, as Orbax wants to be told them; None for one alone."""
    return set(range(jax.process_count())) if jax.process_count() > 1 else None


def write_alone(directory: Path, state: Any) -> None:
    """Writes host arrays from this process only, while others do something else.

    The directory has no other name meanwhile: it is for the caller to make it appear whole. That is what an Orbax
    checkpointer would do beyond this, which takes a third longer.
    """
    import orbax.checkpoint as ocp

    _silence_orbax()
    handler = _handler(_by_itself())
    directory.mkdir(parents=True)
    handler.save(directory, args=ocp.args.PyTreeSave(state))
    handler.finalize(directory)


def _reader(dispatch_limiter: int | None = None) -> Any:
    """An Orbax checkpointer to read with, at most so many bytes at a time."""
    import orbax.checkpoint as ocp

    _silence_orbax()
    alone = _by_itself()
    handler = _handler(alone, restore_concurrent_gb=None if dispatch_limiter is None else dispatch_limiter / 1e9)
    return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _handler(processes: Any, **settings: Any) -> Any:
    import orbax.checkpoint as ocp

    return ocp.PyTreeCheckpointHandler(
        type_handler_registry=_type_handlers(), multiprocessing_options=processes, **settings
    )


def _by_itself() -> Any:
    """Orbax options under which a process waits for no other: by default one that reads alone waits for ever."""
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
