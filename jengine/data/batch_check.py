"""Host checks on a loader's batches, before they are sent to the device."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jengine.config import paths
from jengine.config.errors import ConfigError, config_path
from jengine.data.collate import count_examples
from jengine.data.host_entries import HOST_KINDS, Batch, is_array, select_arrays

# part of an entry's name, and the mesh axes of its axes; see `DataLoader`
BatchRules = Sequence[tuple[str, Any]]
# What batches of one form share: the structure, and shape and dtype of each array; host entries are
# None
BatchForm = (
    Mapping[str, tuple[tuple[int, ...], np.dtype] | None]
    | tuple[jax.tree_util.PyTreeDef, list[Any]]
)

_INT32 = np.iinfo(np.int32)


def batch_settings(
    batch_axis: Literal[0] | None, batch_rules: BatchRules | None
) -> tuple[Literal[0] | None, BatchRules | None]:
    """Return a loader's `batch_axis` and `batch_rules`; the rules are None with the axis 0.

    A rule is a pair of a part of an entry's dotted name, and the mesh axis, or None, for each axis
    of the entry: `("nodes", ("data",))`, or with a `PartitionSpec`. Entries without a rule are
    copied to every device.

    Raises:
      ConfigError: another axis, or rules with the axis 0.
    """
    if batch_axis not in (0, None):
        raise ConfigError(f"`batch_axis` must be 0 or None, got {batch_axis!r}")
    if batch_axis == 0:
        if batch_rules:
            raise ConfigError(
                "`batch_rules` must be given with batch_axis=None: with an axis of examples, that "
                "is sharded"
            )
        return 0, None
    return None, tuple(batch_rules or ())


def batch_form(batch: Batch) -> BatchForm:
    """Return structure, shapes and dtypes of a batch.

    Two batches of equal forms can be stacked to a chunk.

    >>> batch_form({"x": np.zeros(2, np.float32), "file": np.array(["a", "b"])})
    {'x': ((2,), dtype('float32')), 'file': None}
    """
    # the usual batch needs no traversal as a pytree; dicts are equal in any order
    if type(batch) is dict:
        form = {}
        for name, leaf in batch.items():
            if type(leaf) is not np.ndarray:
                break
            form[name] = None if leaf.dtype.kind in HOST_KINDS else (leaf.shape, leaf.dtype)
        else:
            return form
    leaves, structure = jax.tree.flatten(batch)
    arrays = (
        leaf if hasattr(leaf, "dtype") or not is_array(leaf) else np.asarray(leaf)
        for leaf in leaves
    )
    return structure, [(array.shape, array.dtype) if is_array(array) else None for array in arrays]


class BatchCheck:
    """Check that the arrays of each batch share an axis, and that integers fit the device.

    >>> check = BatchCheck("train_dataloader")
    >>> check({"id": np.array([2**40])})
    Traceback (most recent call last):
    ValueError: `train_dataloader` must yield integers that fit in int32, got 1099511627776 to
    1099511627776 in ...

    Args:
      loader: the loader's name in messages: 'train_dataloader'.
      batch_axis: 0 if all arrays must have the examples along their first axis; None for batches of
        any form.
    """

    def __init__(self, loader: str, batch_axis: Literal[0] | None = 0) -> None:
        self._loader = loader
        self._batch_axis = batch_axis
        self._form: BatchForm | None = None  # of the last batch
        self._has_wide_integers = False
        self._count = 0

    def __call__(self, batch: Batch) -> BatchForm:
        """Return the form of a batch.

        Raises:
          ValueError: arrays of other lengths, or an integer that the device would wrap around.
        """
        form = batch_form(batch)
        # Most batches have the form of the one before, which costs less than a microsecond to find
        # out
        if form != self._form:  # all that follows from the form is checked once for each
            if self._batch_axis == 0:
                with config_path(self._loader):
                    count_examples(select_arrays(batch))
            self._form = form
            self._has_wide_integers = any(map(_is_wide_integer, jax.tree.leaves(batch)))
        leaves = paths.flatten(batch).items() if self._has_wide_integers else ()
        for path, leaf in leaves:
            if not _is_wide_integer(leaf) or not leaf.size or jax.config.read("jax_enable_x64"):
                continue
            # JAX would wrap them around in silence: an ID of 2**32 + 1 becomes 1.
            low = int(leaf.min())
            high = int(leaf.max())
            if low < _INT32.min or high > _INT32.max:
                raise ValueError(
                    f"`{self._loader}` must yield integers that fit in int32, got {low} to {high} "
                    f"in the entry {path!r} of batch {self._count}; leave the entry out, turn it "
                    "into strings, which stay on the host, or set jax_enable_x64"
                )
        self._count += 1
        return form


def _is_wide_integer(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.itemsize == 8 and leaf.dtype.kind in "iu"


def describe_batch(batch: Batch) -> dict[str, str]:
    """Return the dtype and shape for each entry by dotted path: 'float32[64, 8, 8, 1]'."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
        for path, leaf in paths.flatten(batch).items()
    }
