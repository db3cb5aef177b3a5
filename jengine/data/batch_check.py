"""Host checks on a loader's batches, before they are sent to the device."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import numpy as np

from jengine import paths
from jengine.data.host_entries import is_array, list_host_entries

_INT32 = np.iinfo(np.int32)
_ARRAYS = {np.ndarray}
_INSPECTED = 10  # batches


class BatchCheck:
    """Check that each batch has the same structure, and integers that fit the device.

    >>> check = BatchCheck("train_dataloader")
    >>> check({"id": np.array([2**40])})
    Traceback (most recent call last):
    ValueError: `train_dataloader` must yield integers that fit in int32, got 1099511627776 to 1099511627776 in ...

    Args:
      loader: the loader's name in messages: 'train_dataloader'.

    Attributes:
      inspect: called with each of the first batches; raises for one that cannot be used. None for no further check.
    """

    def __init__(self, loader: str) -> None:
        self.inspect: Callable[[Any], None] | None = None
        self._loader = loader
        self._first: list[str] = []
        self._structure: Any = None
        self._count = 0

    def __call__(self, batch: Any) -> Any:
        """Return the batch.

        Raises:
          TypeError: no array, so that nothing reaches the model. ValueError: another structure than the first, or an
            integer that the device would wrap around.
        """
        structure: Any
        leaves: Iterable[Any]
        if type(batch) is dict and set(map(type, batch.values())) == _ARRAYS:  # needs no traversal as a pytree
            structure, leaves = tuple(batch), batch.values()
        else:
            structure, leaves = jax.tree.structure(batch), jax.tree.leaves(batch)
        if self._structure is None or structure != self._structure:
            self._check_structure(batch, structure)
        for leaf in leaves:
            if type(leaf) is np.ndarray and leaf.dtype.itemsize == 8 and leaf.dtype.kind in "iu":
                self._check_integers(batch, leaf)
        if self._count < _INSPECTED and self.inspect is not None:
            self.inspect(batch)
        self._count += 1
        return batch

    def _check_structure(self, batch: Any, structure: Any) -> None:
        entries = paths.flatten(batch)
        if self._structure is None:
            if not any(map(is_array, entries.values())):
                raise TypeError(
                    f"`{self._loader}` must yield batches with numeric arrays, got "
                    f"{list_host_entries(batch) or type(batch).__name__}: strings and arrays of objects stay on the "
                    "host; stack numbers of equal shapes, or pass a collate_fn"
                )
            self._structure, self._first = structure, list(entries)
        missing = [f"without {path!r}" for path in self._first if path not in entries]
        added = [f"with {path!r}" for path in entries if path not in self._first]
        if missing or added:
            raise ValueError(
                f"`{self._loader}` must yield batches with the entries of the first one, {self._first}, got batch "
                f"{self._count} {' and '.join(missing + added)}; give every sample the same entries"
            )

    def _check_integers(self, batch: Any, array: np.ndarray) -> None:
        low, high = (int(array.min()), int(array.max())) if array.size else (0, 0)
        if (low >= _INT32.min and high <= _INT32.max) or jax.config.read("jax_enable_x64"):
            return
        path = next(path for path, leaf in paths.flatten(batch).items() if leaf is array)
        raise ValueError(
            f"`{self._loader}` must yield integers that fit in int32, got {low} to {high} in the entry {path!r} of "
            f"batch {self._count}; leave the entry out, turn it into strings, which stay on the host, or set "
            "jax_enable_x64"
        )


def describe_batch(batch: Any) -> dict[str, str]:
    """Return the dtype and shape for each entry by dotted path: 'float32[64, 8, 8, 1]'."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
        for path, leaf in paths.flatten(batch).items()
    }
