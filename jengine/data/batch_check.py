"""Check the batches of a loader on the host, before they are sent to the device."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine import paths
from jengine.data.collate import is_flat
from jengine.data.host_entries import is_array

_INT32 = np.iinfo(np.int32)


class BatchCheck:
    """Check that each batch has the structure of the first one, and integers that fit the device.

    Args:
      loader: the name of the loader in messages: 'train_dataloader'.
    """

    def __init__(self, loader: str) -> None:
        self._loader = loader
        self._first: Any = None
        self._structure: Any = None
        self._count = 0

    def __call__(self, batch: Any) -> Any:
        """Return the batch.

        Raises:
          TypeError: there is no array in it, so that nothing reaches the model.
          ValueError: it has another structure than the first, or an integer that the device would wrap around.
        """
        structure = tuple(batch) if is_flat(batch) else jax.tree.structure(batch)
        if self._structure is None:
            self._check_arrays(batch)
            self._first, self._structure = batch, structure
            self._first = list(paths.flatten(batch))
        elif structure != self._structure and set(paths.flatten(batch)) != set(self._first):
            self._raise_structure(batch)
        self._check_integers(batch)
        self._count += 1
        return batch

    def _check_arrays(self, batch: Any) -> None:
        leaves = paths.flatten(batch)
        if any(map(is_array, leaves.values())):
            return
        kinds = {path: str(getattr(leaf, "dtype", type(leaf).__name__)) for path, leaf in leaves.items()}
        raise TypeError(
            f"`{self._loader}` must yield batches with numeric arrays, got {kinds or type(batch).__name__}: strings "
            "and arrays of objects stay on the host; stack numbers of equal shapes, or pass a collate_fn"
        )

    def _raise_structure(self, batch: Any) -> None:
        own = list(paths.flatten(batch))
        missing = [path for path in self._first if path not in own]
        added = [path for path in own if path not in self._first]
        differences = [*(f"without {path!r}" for path in missing), *(f"with {path!r}" for path in added)]
        raise ValueError(
            f"`{self._loader}` must yield batches with the entries of the first one, {self._first}, got batch "
            f"{self._count} {' and '.join(differences)}; give every sample the same entries"
        )

    def _check_integers(self, batch: Any) -> None:
        leaves = batch.values() if is_flat(batch) else jax.tree.leaves(batch)
        for leaf in leaves:
            if not isinstance(leaf, np.ndarray) or leaf.dtype.itemsize != 8 or leaf.dtype.kind not in "iu":
                continue
            if leaf.size:
                low, high = int(leaf.min()), int(leaf.max())
                if (low < _INT32.min or high > _INT32.max) and not jax.config.read("jax_enable_x64"):
                    self._raise_integers(batch, leaf, low, high)

    def _raise_integers(self, batch: Any, wrong: np.ndarray, low: int, high: int) -> None:
        path = next(path for path, leaf in paths.flatten(batch).items() if leaf is wrong)
        raise ValueError(
            f"`{self._loader}` must yield integers that fit in int32, got {low} to {high} in the entry {path!r} of "
            f"batch {self._count}; leave the entry out, turn it into strings, which stay on the host, or set "
            "jax_enable_x64"
        )


def describe_batch(batch: Any) -> dict[str, str]:
    """Return the dtype and shape of each entry of a batch by dotted path: 'float32[64, 8, 8, 1]'."""
    return {path: _describe(leaf) for path, leaf in paths.flatten(batch).items()}


def _describe(leaf: Any) -> str:
    if isinstance(leaf, Mapping) or not hasattr(leaf, "dtype"):
        return type(leaf).__name__
    return f"{leaf.dtype}{list(leaf.shape)}"
