"""Arrays as checkpoints store them.

Typed PRNG keys are stored as raw data and become keys again where the target has keys. Arrays on
disk are addressed by dotted path (`opt_state.1.0.mu.kernel`), so a NamedTuple, a dict and a
dataclass with the same names are equivalent.
"""

import re
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jengine.config.errors import ConfigError
from jengine.config.paths import flatten, map_with_path, unwrap
from jengine.parallel.processes import put_whole

_EMPTY = re.compile(r"empty:(\w+):(\d+(?:x\d+)*)")


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
      alone: as for `start_write`.

    Returns:
      The pytree to write, with the dotted paths of `flatten`. NumPy arrays and arrays on one CPU
      are copied, so the next step may overwrite them during the write; Orbax copies those on other
      devices.

    Raises:
      TypeError: a leaf is neither an array nor a number. ValueError: see `check_storable`; or a
        leaf was donated to a step that did not return.
    """
    check_storable(state)  # before anything is copied
    in_memory = _in_host_memory(state)
    is_shared = jax.process_count() > 1 and not alone

    def encode_leaf(path: str, leaf: Any) -> Any:
        if isinstance(leaf, jax.Array):
            if leaf.is_deleted():
                raise ValueError(
                    f"cannot save `{path}`: its buffer was donated to a step that did not finish; "
                    "the last checkpoint before that step is the newest valid state"
                )
            # TensorStore has no PRNG keys
            leaf = jax.random.key_data(leaf) if is_key(leaf) else leaf
            # An equal copy in each process: Orbax writes the first one's
            if in_memory or (leaf.is_fully_addressable and is_shared):
                leaf = np.array(leaf)
        elif isinstance(leaf, np.ndarray | np.generic | bool | int | float | complex):
            leaf = np.array(leaf)
        else:
            raise TypeError(
                f"`{path}` must be an array, got {type(leaf).__name__}; store other values in "
                "`meta`"
            )
        if leaf.size:
            return leaf
        # TensorStore cannot write it: a byte with its shape in its name
        name = f"empty:{leaf.dtype.name}:{'x'.join(map(str, leaf.shape))}"
        return {name: encode_leaf(path, False)}

    return unwrap(map_with_path(encode_leaf, state))


def check_storable(state: Any) -> None:
    """Raise ConfigError for arrays, or their shapes, that a save could not store: of a dtype that
    TensorStore lacks, or two with one dotted path.
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


def find_empty(node: Any) -> jax.ShapeDtypeStruct | None:
    """Return the empty array that a node of a stored tree stands for; None for other nodes.

    `encode` stores an empty array as a byte, and its shape and dtype in the name.
    """
    if not isinstance(node, Mapping) or len(node) != 1:
        return None
    found = _EMPTY.fullmatch(str(next(iter(node))))
    shape = tuple(map(int, found[2].split("x"))) if found else ()
    # Only without elements: a file must not allocate memory by the name of an array.
    return jax.ShapeDtypeStruct(shape, jnp.dtype(found[1])) if found and 0 in shape else None


def _in_host_memory(state: Any) -> bool:
    """Return whether a single CPU holds all arrays."""
    arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
    devices: set[Any] = set().union(*(leaf.sharding.device_set for leaf in arrays))
    return len(devices) <= 1 and all(device.platform == "cpu" for device in devices)


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
