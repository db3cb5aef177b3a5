"""Adapt loaders of other libraries: anything with a length that yields batches, with the interface of `DataLoader`."""

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.data.collate import is_flat, pad_rows, row_count, with_mask


class IterableLoader:
    """Yield the batches of a foreign loader as numpy pytrees of one size.

    A PyTorch DataLoader, a list of batches, or TensorFlow data through `tfds.as_numpy` will do. To start in the middle
    of an epoch, the batches before are read and dropped: only the source itself could avoid it.

    Args:
      iterable: has `__len__` (batches of an epoch) and `__iter__` (a new pass); it gets the epoch through
        `set_epoch`, `sampler.set_epoch` or `batch_sampler.sampler.set_epoch`, the first that it has. With several
        processes it yields this process's share.
      train: whether a smaller last batch is dropped, with one warning. When False it is padded, and every batch gets
        `mask`: bool[B], True for a real row.
      num_batch_per_epoch: limits the epoch to that many batches.

    Attributes:
      device_prefetch: batches that a loop sends to the device ahead of the one that it computes on: the iterable's
        attribute of that name, else 2.

    Raises:
      TypeError: no length, or an iterator that allows only one pass. ValueError: no batches.
    """

    def __init__(self, iterable: Iterable[Any], train: bool, num_batch_per_epoch: int | None = None) -> None:
        self.iterable = iterable
        self.train = train
        self.device_prefetch: int = getattr(iterable, "device_prefetch", 2)
        self._total = _length(iterable)
        self._ragged = _last_is_smaller(iterable, self._total)  # None: unknown before the end of a pass
        self._limit = num_batch_per_epoch
        if self._ragged and train:
            self._drop_last()
        if len(self) < 1:
            raise ValueError("the data must have at least one whole batch; reduce the batch size")
        self._epoch = self._start = self._position = 0
        self._rows: int | None = None

    @property
    def dataset(self) -> Any:
        """The dataset behind the loader where it has one, else the loader itself."""
        return getattr(self.iterable, "dataset", self.iterable)

    @property
    def batch_size(self) -> int | None:
        """Rows of a batch, if the loader has the number or a batch was read; else None."""
        size = getattr(self.iterable, "batch_size", None)
        return size if isinstance(size, int) else self._rows

    def __len__(self) -> int:
        return self._total if self._limit is None else min(self._total, self._limit)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields."""
        return self._epoch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Set the next iteration to `epoch` from batch `start` on; those before are read and dropped.

        Raises:
          ValueError: `start` is not a position in the epoch.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be a batch of the epoch, 0 to {len(self)}, got {start}")
        for owner in (self.iterable, _attribute(self.iterable, "sampler"),
                      _attribute(self.iterable, "batch_sampler", "sampler")):  # fmt: skip
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(epoch)
                break
        self._epoch, self._start, self._position = epoch, start, start

    def __iter__(self) -> Iterator[Any]:
        start, self._start = self._start, 0
        self._position = start
        return self._batches(start)

    def state_dict(self) -> dict[str, int]:
        """Return the position after the last batch that was yielded: the epoch, and the batches yielded in it."""
        if self._position >= len(self):
            return {"epoch": self._epoch + 1, "position": 0}
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position that `state_dict` returned."""
        self.set_epoch(int(state["epoch"]), int(state["position"]))

    def copy_at_epoch(self, epoch: int) -> "IterableLoader":
        """Return a loader of the same batches at the start of `epoch`; passes of the source must be independent.

        Raises:
          ValueError: a source with `persistent_workers`, which starts a new pass by ending the current one.
        """
        if getattr(self.iterable, "persistent_workers", False):
            raise ValueError(
                f"{type(self.iterable).__name__} with persistent_workers=True allows one pass at a time; remove it"
            )
        other = copy.copy(self)
        other.set_epoch(epoch)
        return other

    def _batches(self, start: int) -> Iterator[Any]:
        size, usual = None, None
        for position, raw in enumerate(itertools.islice(self.iterable, len(self))):
            if position < start and size is not None:
                continue
            shapes = [leaf.shape for leaf in raw.values()] if is_flat(raw) else None
            if self.train and shapes is not None and shapes == usual:  # the earlier checks still hold
                self._position = position + 1
                yield raw
                continue
            batch = _to_numpy(raw) if shapes is None else raw
            rows = row_count(batch)
            size = self._rows = size or rows
            if position < start:
                continue
            if rows > size or (rows < size and position != self._total - 1):
                raise ValueError(f"batches must be of one size; the first has {size} rows, number {position} {rows}")
            if rows < size and self.train:
                self._drop_last()
                return
            usual = shapes
            self._position = position + 1
            yield batch if self.train else self._masked(batch, rows, size)

    def _masked(self, batch: Any, rows: int, size: int) -> Any:
        if self._ragged is False and not isinstance(batch, Mapping):
            return batch  # known to need no padding: no mask
        return with_mask(pad_rows(batch, size) if rows < size else batch, np.arange(size) < rows)

    def _drop_last(self) -> None:
        warnings.warn(
            f"the last of {self._total} batches is smaller than the others and is left out of training, which would "
            "else compile for two sizes; say drop_last=True (drop_remainder=True) where the batches are made",
            stacklevel=3,
        )
        self._total -= 1
        self._ragged = False


def _length(iterable: Any) -> int:
    advice = (
        "give an object with __len__, the batches of an epoch, and __iter__, which starts a new pass: a list of "
        "batches, a PyTorch DataLoader, tfds.as_numpy(dataset)"
    )
    if not hasattr(iterable, "__iter__"):
        if hasattr(iterable, "__getitem__"):
            raise TypeError(f"{type(iterable).__name__} is a dataset; use dict(dataset=..., batch_size=...)")
        raise TypeError(f"a dataloader must be a config dict or an iterable of batches, got {type(iterable).__name__}")
    if hasattr(iterable, "__next__"):
        raise TypeError(f"{type(iterable).__name__} allows only one pass: {advice}")
    try:
        return len(iterable)
    except TypeError as error:
        raise TypeError(f"{type(iterable).__name__} has no length: {advice}") from error


def _last_is_smaller(iterable: Any, total: int) -> bool | None:
    """Return whether the last batch has fewer rows, if that can be known without a pass over the data."""
    if total < 2:
        return False
    if isinstance(iterable, Sequence):
        return row_count(_to_numpy(iterable[-1])) < row_count(_to_numpy(iterable[0]))
    source: Any = iterable
    size, sampler = getattr(source, "batch_size", None), _attribute(source, "sampler")
    if not isinstance(size, int) or not hasattr(source, "drop_last") or not hasattr(sampler, "__len__"):
        return None
    return not source.drop_last and len(sampler) % size != 0


def _to_numpy(batch: Any) -> Any:
    def convert(leaf: Any) -> Any:
        if isinstance(leaf, np.ndarray | jax.Array):
            return leaf
        if hasattr(leaf, "detach"):  # a torch tensor, recognized without importing torch
            leaf = leaf.detach().cpu()
        return np.asarray(leaf)

    return jax.tree.map(convert, batch)


def _attribute(owner: Any, *names: str) -> Any:
    for name in names:
        owner = getattr(owner, name, None)
    return owner
