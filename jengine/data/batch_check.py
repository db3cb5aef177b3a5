"""Host checks on a loader's batches, before they are sent to the device."""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jengine.config import paths
from jengine.config.errors import ConfigError
from jengine.data.host_entries import HOST_KINDS, Batch, is_array, list_host_entries

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
    """Check that each batch has the same structure, and integers that fit the device.

    >>> check = BatchCheck("train_dataloader")
    >>> check({"id": np.array([2**40])})
    Traceback (most recent call last):
    ValueError: `train_dataloader` must yield integers that fit in int32, got 1099511627776 to
    1099511627776 in ...

    Args:
      loader: the loader's name in messages: 'train_dataloader'.
      batch_axis: 0 if all arrays must have the examples along their first axis; None for batches of
        any form.
      batch_rules: pairs of a part of a name and axes, see `DataLoader`; each must match an entry.
    """

    def __init__(
        self, loader: str, batch_axis: Literal[0] | None = 0, batch_rules: BatchRules | None = None
    ) -> None:
        self._loader = loader
        self._batch_axis = batch_axis
        self._rules = batch_rules or ()
        self._first: list[str] = []  # entries of the first batch
        self._form: BatchForm | None = None  # of the last batch
        self._has_wide_integers = False
        self._count = 0

    def __call__(self, batch: Batch) -> BatchForm:
        """Return the form of a batch.

        Raises:
          TypeError: no array, so that nothing reaches the model. ValueError: other entries than the
            first, arrays of other lengths, or an integer that the device would wrap around.
            ConfigError: a rule that matches no entry.
        """
        form = batch_form(batch)
        # Most batches have the form of the one before, which costs less than a microsecond to find
        # out
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
        # The first batch only: entries and rules are compared by name, which all later batches must
        # share.
        if self._form is None:
            if not any(map(is_array, entries.values())):
                raise TypeError(
                    f"`{self._loader}` must yield batches with numeric arrays, got "
                    f"{list_host_entries(batch) or type(batch).__name__}: strings and arrays of "
                    "objects stay on the host; stack numbers of equal shapes, or pass a collate_fn"
                )
            self._first = list(entries)
            for key, _ in self._rules:
                if not any(key in path for path in entries):
                    raise ConfigError(
                        f"`{self._loader}.batch_rules` must be parts of names of entries, got "
                        f"{key!r}{paths.closest_paths(key, entries)}"
                    )
        if set(entries) != set(self._first):
            raise ValueError(
                f"`{self._loader}` must yield batches with the entries of the first one, "
                f"{self._first}, got {list(entries)} in batch {self._count}; give every sample the "
                "same entries"
            )
        shapes = {path: np.shape(leaf) for path, leaf in entries.items() if is_array(leaf)}
        if self._batch_axis == 0 and (
            len({shape[:1] for shape in shapes.values()}) > 1 or () in shapes.values()
        ):
            raise ValueError(
                f"`{self._loader}` must yield batches whose arrays share their first axis, the "
                f"examples, got {shapes}; "
                "with batch_axis=None in the dataloader, batches of any form are passed on"
            )

    def _check_integers(self, batch: Batch) -> None:
        for path, leaf in paths.flatten(batch).items():
            if not _is_wide_integer(leaf) or not leaf.size:
                continue
            # JAX would wrap them around in silence: an ID of 2**32 + 1 becomes 1.
            low = int(leaf.min())
            high = int(leaf.max())
            if (low < _INT32.min or high > _INT32.max) and not jax.config.read("jax_enable_x64"):
                raise ValueError(
                    f"`{self._loader}` must yield integers that fit in int32, got {low} to {high} "
                    f"in the entry {path!r} of batch {self._count}; leave the entry out, turn it "
                    "into strings, which stay on the host, or set jax_enable_x64"
                )


def _is_wide_integer(leaf: object) -> bool:
    return isinstance(leaf, np.ndarray) and leaf.dtype.itemsize == 8 and leaf.dtype.kind in "iu"


def describe_batch(batch: Batch) -> dict[str, str]:
    """Return the dtype and shape for each entry by dotted path: 'float32[64, 8, 8, 1]'."""
    return {
        path: f"{leaf.dtype}{list(leaf.shape)}" if hasattr(leaf, "dtype") else type(leaf).__name__
        for path, leaf in paths.flatten(batch).items()
    }
