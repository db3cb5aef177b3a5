"""Adapt loaders of other libraries to the interface of `DataLoader`."""

import copy
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.data.collate import count_examples, is_flat, pad_examples
from jengine.data.masking import with_mask


class IterableLoader:
    """Yield the batches of a foreign loader as numpy pytrees of one size.

    The loader may be a PyTorch DataLoader, a list of batches, or TensorFlow data through `tfds.as_numpy`. To start in
    the middle of an epoch, the batches before are read and dropped.

    Args:
      iterable: has `__len__` (batches per epoch) and `__iter__` (a new pass). The epoch is passed to the first of
        `set_epoch`, `sampler.set_epoch` and `batch_sampler.sampler.set_epoch` that exists. With several processes it
        yields the share of this process.
      train: whether a smaller last batch is dropped, with one warning. When False it is padded, and every batch gets
        `mask`: bool[B], True for a real example.
      num_batch_per_epoch: maximum number of batches per epoch.

    Attributes:
      device_prefetch: batches that a loop sends to the device ahead of the current one: the attribute of that name of
        the iterable, or 2.

    Raises:
      TypeError: an iterable without a length, or that allows only one pass. ValueError: no batches.
    """

    def __init__(self, iterable: Iterable[Any], train: bool, num_batch_per_epoch: int | None = None) -> None:
        self.iterable = iterable
        self.train = train
        self.device_prefetch: int = getattr(iterable, "device_prefetch", 2)
        self._total = _length(iterable)
        self._last_smaller = _last_is_smaller(iterable, self._total)  # None: unknown before the end of a pass
        self._limit = num_batch_per_epoch
        if self._last_smaller and train:
            self._drop_last()
        if len(self) < 1:
            raise ValueError("the data must have at least one whole batch; reduce the batch size")
        self._epoch = self._start = self._position = 0
        self._first_size: int | None = None

    @property
    def dataset(self) -> Any:
        """The dataset of the loader, or the loader itself if it has none."""
        return getattr(self.iterable, "dataset", self.iterable)

    @property
    def metainfo(self) -> Any:
        """The metainfo of the dataset (class names and so on); None if it has none."""
        return getattr(self.dataset, "metainfo", None)

    @property
    def sampler(self) -> Any:
        """The sampler of the loader; None if it has none."""
        return getattr(self.iterable, "sampler", None)

    @property
    def batch_size(self) -> int | None:
        """The examples per batch; None if the loader does not have the number and no batch has been read."""
        size = getattr(self.iterable, "batch_size", None)
        return size if isinstance(size, int) else self._first_size

    def __len__(self) -> int:
        return self._total if self._limit is None else min(self._total, self._limit)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields."""
        return self._epoch

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Start the next iteration at batch `start` of `epoch`; the batches before are read and dropped.

        Raises:
          ValueError: `start` is outside the epoch.
        """
        if not 0 <= start <= len(self):
            raise ValueError(f"start must be a position in the epoch, 0 to {len(self)}, got {start}")
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
        """Return the epoch, and the number of batches yielded in it."""
        if self._position >= len(self):
            return {"epoch": self._epoch + 1, "position": 0}
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position that `state_dict` returned."""
        self.set_epoch(int(state["epoch"]), int(state["position"]))

    def copy_at_epoch(self, epoch: int) -> "IterableLoader":
        """Return a loader of the same batches at the start of `epoch`; requires a source with independent passes.

        Raises:
          ValueError: a source with `persistent_workers`, where a new pass ends the current one.
        """
        if getattr(self.iterable, "persistent_workers", False):
            raise ValueError(
                f"{type(self.iterable).__name__} must not have persistent_workers=True, which allows only one pass at "
                "a time; remove it"
            )
        other = copy.copy(self)
        other.set_epoch(epoch)
        return other

    def _batches(self, start: int) -> Iterator[Any]:
        size, full_shapes = None, None
        for position, raw in enumerate(itertools.islice(self.iterable, len(self))):
            if position < start and size is not None:
                continue
            shapes = [leaf.shape for leaf in raw.values()] if is_flat(raw) else None
            if self.train and shapes is not None and shapes == full_shapes:  # already checked
                self._position = position + 1
                yield raw
                continue
            batch = _to_numpy(raw) if shapes is None else raw
            count = count_examples(batch)
            size = self._first_size = size or count
            if position < start:
                continue
            if count > size or (count < size and position != self._total - 1):
                raise ValueError(
                    f"batches must have the same size, got {size} examples in batch 0 and {count} in batch {position}"
                )
            if count < size and self.train:
                self._drop_last()
                return
            full_shapes = shapes
            self._position = position + 1
            yield batch if self.train else self._add_mask(batch, count, size)

    def _add_mask(self, batch: Any, count: int, size: int) -> Any:
        if self._last_smaller is False and not isinstance(batch, Mapping):
            return batch  # no batch needs padding, so none needs a mask
        return with_mask(pad_examples(batch, size) if count < size else batch, np.arange(size) < count)

    def _drop_last(self) -> None:
        warnings.warn(
            f"the last of {self._total} batches is smaller than the others and is dropped: training would have to "
            "compile for two sizes; set drop_last=True (drop_remainder=True) in the loader",
            stacklevel=3,
        )
        self._total -= 1
        self._last_smaller = False


def _length(iterable: Any) -> int:
    advice = (
        "pass an object with __len__, the batches per epoch, and __iter__, which starts a new pass: a list of "
        "batches, a PyTorch DataLoader, tfds.as_numpy(dataset)"
    )
    if not hasattr(iterable, "__iter__"):
        if hasattr(iterable, "__getitem__"):
            raise TypeError(
                f"a dataloader must be a config dict or an iterable of batches, got the dataset "
                f"{type(iterable).__name__}; use dict(dataset=..., batch_size=...)"
            )
        raise TypeError(f"a dataloader must be a config dict or an iterable of batches, got {type(iterable).__name__}")
    if hasattr(iterable, "__next__"):
        raise TypeError(f"a dataloader must allow several passes, got {type(iterable).__name__}; {advice}")
    try:
        return len(iterable)
    except TypeError as error:
        raise TypeError(f"a dataloader must have a length, got {type(iterable).__name__}; {advice}") from error


def _last_is_smaller(iterable: Any, total: int) -> bool | None:
    """Return whether the last batch is smaller; None if that is unknown without a pass over the data."""
    if total < 2:
        return False
    if isinstance(iterable, Sequence):
        return count_examples(_to_numpy(iterable[-1])) < count_examples(_to_numpy(iterable[0]))
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
    """Return a nested attribute of a foreign object, or None."""
    for name in names:
        owner = getattr(owner, name, None)
    return owner
