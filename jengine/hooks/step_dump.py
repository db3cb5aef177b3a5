"""The arguments of one training step, written to a file so that the step can be run again."""

import os
import pathlib
import pickle
from typing import Any

import jax
import numpy as np

PyTree = Any


def write_dump(path: str | os.PathLike[str], **arguments: PyTree) -> None:
    """Writes pytrees of arrays; every process calls it, the first one writes.

    Args:
      path: the file.
      **arguments: what to write, by name. Typed keys are kept as such.
    """
    if jax.process_count() > 1:
        from jax.experimental import multihost_utils

        def fetch(leaf: Any) -> Any:
            return leaf if _is_local(leaf) else multihost_utils.process_allgather(leaf, tiled=True)

        arguments = jax.tree.map(fetch, arguments)
    if jax.process_index() == 0:
        file = pathlib.Path(path)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(pickle.dumps(jax.tree.map(_plain, arguments)))


def read_dump(path: str | os.PathLike[str]) -> dict[str, PyTree]:
    """What `write_dump` wrote, by name. The file is a pickle: read only those of your own runs.

    Raises:
      ValueError: the file is none of those.
    """
    try:
        arguments = pickle.loads(pathlib.Path(path).read_bytes())
    except pickle.UnpicklingError as error:
        raise ValueError(f"{path} is no dump of a training step") from error
    return jax.tree.map(
        lambda x: jax.random.wrap_key_data(jax.numpy.asarray(x.data), impl=x.impl) if isinstance(x, _Key) else x,
        arguments,
        is_leaf=lambda x: isinstance(x, _Key),
    )


class _Key:
    """A typed key on its way through the file."""

    def __init__(self, key: jax.Array) -> None:
        self.data = np.asarray(jax.random.key_data(key))
        self.impl = str(jax.random.key_impl(key))


def _plain(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        return _Key(leaf)
    return np.asarray(leaf)


def _is_local(leaf: Any) -> bool:
    return not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated
