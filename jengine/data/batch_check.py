"""Host checks on a loader's batches, before they are sent to the device."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jengine import paths
from jengine.data.host_entries import HOST_KINDS, is_array, list_host_entries

Batch = Any  # a pytree of arrays, and of host entries
# What batches of one form share: the structure, and shape and dtype of each array; host entries are None
BatchForm = Mapping[str, tuple[tuple[int, ...], np.dtype] | None] | tuple[jax.tree_util.PyTreeDef, list[Any]]

_INT32 = np.iinfo(np.int32)


def batch_form(batch: Batch) -> BatchForm:
    """Return structure, shapes and dtypes of a batch; two batches of equal forms can be stacked to a chunk.

    >>> batch_form({"x": np.zeros(2, np.float32), "file": np.array(["a", "b"])})
    {'x': ((2,), dtype('float32')), 'file': None}
    """
    if type(batch) is dict:  # the usual batch needs no traversal as a pytree; dicts are equal in any order
        form = {}
        for name, leaf in batch.items():
            if type(leaf) is not np.ndarray:
                break
            form[name] = None if leaf.dtype.kind in HOST_KINDS else (leaf.shape, leaf.dtype)
        else:
            return form
    leaves, structure = jax.tree.flatten(batch)
    arrays = (leaf if hasattr(leaf, "dtype") or not is_array(leaf) else np.asarray(leaf) for leaf in leaves)
    return structure, [(array.shape, array.dtype) if is_array(array) else None for array in arrays]


class BatchCheck:
    """Check that each batch has the same structure, and integers that fit the device.

    >>> check = BatchCheck("train_dataloader")
    >>> check({"id": np.array([2**40])})
    Traceback (most recent call last):
    ValueError: `train_dataloader` must yield integers that fit in int32, got 1099511627776 to 1099511627776 in ...

    Args:
      loader: the loader's name in messages: 'train_dataloader'.
    """

    def __init__(self, loader: str) -> None:
        self._loader = loader
        self._first: list[str] = []  # entries of the first batch
        self._form: BatchForm | None = None  # of the last batch
        self._has_wide_integers = False
        self._count = 0

    def __call__(self, batch: Batch) -> BatchForm:
        """Return the form of a batch.

        Raises:
          TypeError: no array, so that nothing reaches the model. ValueError: other entries than the first, or an
            integer that the device would wrap around.
        """
        form = batch_form(batch)
        if form != self._form:  # all that follows from the form is checked once for each
            self._check_entries(batch)
            self._form = form
            self._has_wide_integers = any(map(_is_wide_integer, jax.tree.leaves(batch)))
        if self._has_wide_integers:
            self._check_integers(batch)
        self._count += 1
        return form

    def _check_entries(self, batch: Batch) -> None:
        entries = paths.flatten(batch)
        if self._form is None:
            if not any(map(is_array, entries.values())):
                raise TypeError(
                    f"`{self._loader}` must yield batches with numeric arrays, got "
                    f"{list_host_entries(batch) or type(batch).__name__}: strings and arrays of objects stay on the "
                    "host; stack numbers of equal shapes, or pass a collate_fn"
                )
            self._first = list(entries)
        missing = [f"without {path!r}" for path in self._first if path not in entries]
        added = [f"with {path!r}" for path in entries if path not in self._first]
        if missing or added:
            raise ValueError(
                f"`{self._loader}` must yield batches with the entries of the first one, {self._first}, got batch "
                f"{self._count} {' and '.join(missing + added)}; give every sample the same entries"
            )

    def _check_integers(self, batch: Batch) -> None:
        for path, leaf in paths.flatten(batch).items():
            if not _is_wide_integer(leaf) or not leaf.size:
                continue
            low, high = int(leaf.min()), int(leaf.max())
            if (low < _INT32.min or high > _INT32.max) and not jax.config.read("jax_enable_x64"):
                raise ValueError(
                    f"`{self._loader}` must yield integers that fit in int32, got {low} to {high} in the entry "
                    f"{path!r} of batch {self._count}; leave the entry out, turn it into strings, which stay on the "
                    "host, or set jax_enable_x64"
                )


def _is_wide_integer(leaf: Any) -> bool:
    return type(leaf) is np.ndarray and leaf.dtype.itemsize == 8 and leaf.dtype.kind in "iu"


def describe_batch(batch: Batch) -> dict[str, str]:
    """Return the dtype and shape for each entry by dotted path: 'float32[64, 8, 8, 1]'."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
        for path, leaf in paths.flatten(batch).items()
    }
