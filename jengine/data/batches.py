"""Batches by number, and reading ahead of them with grain.

Batch i of epoch e has the number e * length + i. Because any number can be asked for, threads and worker processes may
work on different ones, and a restart goes straight to its place.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from jengine.data.collate import with_mask

# More epochs than a run has: grain asks how long a source is.
_EPOCHS = 2**24


class Order(Protocol):
    """What is asked of a sampler here."""

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """At most `count` indices of this process for `epoch`: int64[<= count]."""

    def num_real(self, count: int) -> int:
        """How many of the first `count` indices are no repetition."""


class Batches:
    """A random-access source whose element is a whole batch. Pickles, if its parts do.

    Args:
      dataset: has `__getitems__(indices)` or `__getitem__(index)`.
      order: the sampler.
      collate: list of samples -> batch.
      batch_size: rows of a batch.
      length: batches of an epoch.
      masked: whether short batches are padded and every batch is told which rows are real.
    """

    def __init__(
        self,
        dataset: Any,
        order: Order,
        collate: Callable[[Sequence[Any]], Any],
        batch_size: int,
        length: int,
        masked: bool,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self.collate = collate
        self.batch_size = batch_size
        self.length = length
        self.masked = masked
        self._epoch: tuple[int, np.ndarray, np.ndarray] | None = None

    def __len__(self) -> int:
        return self.length * _EPOCHS

    def __repr__(self) -> str:
        return f"Batches({type(self.dataset).__name__}, batch_size={self.batch_size})"

    def __getitem__(self, number: int) -> Any:
        epoch, index = divmod(number, self.length)
        indices, mask = self.load_epoch(epoch)
        rows = slice(index * self.batch_size, (index + 1) * self.batch_size)
        batch = self._fetch(epoch, indices[rows])
        return with_mask(batch, mask[rows]) if self.masked else batch

    def load_epoch(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """The sample of every row of `epoch` and whether it is real: int64[length * batch_size], bool of that shape."""
        loaded = self._epoch
        if loaded is None or loaded[0] != epoch:
            count = self.length * self.batch_size
            indices = self.order.indices(epoch, count)
            real = min(len(indices), self.order.num_real(count))
            padding = np.full(count - len(indices), indices[0] if len(indices) else 0, indices.dtype)
            loaded = self._epoch = (epoch, np.concatenate([indices, padding]), np.arange(count) < real)
        return loaded[1:]

    def _fetch(self, epoch: int, indices: np.ndarray) -> Any:
        dataset = self.dataset.at_epoch(epoch) if hasattr(self.dataset, "at_epoch") else self.dataset
        if hasattr(dataset, "__getitems__"):
            fetched = dataset.__getitems__(indices)
            # Torch's convention is a list of samples; ours is the batch, fetched by one indexing of each array.
            return self.collate(fetched) if isinstance(fetched, list) else fetched
        return self.collate([dataset[index] for index in indices.tolist()])


class ReadAhead:
    """Iterates over batches from a number on, built ahead in threads and worker processes.

    Args:
      batches: the source.
      first: number of the first batch.
      stop: number after the last; nothing is read from there on.
      num_workers: worker processes; 0 for threads alone.
      num_threads: threads, in each worker if there are any.
      prefetch_factor: batches that each worker or thread has ready.
    """

    def __init__(
        self, batches: Batches, first: int, stop: int, num_workers: int, num_threads: int, prefetch_factor: int
    ) -> None:
        import grain
        from absl import flags

        if num_workers and not flags.FLAGS.is_parsed():
            flags.FLAGS.mark_as_parsed()  # grain reads flags of its own, which a script without absl never parses
        threads = grain.ReadOptions(num_threads, num_threads * prefetch_factor)
        dataset = grain.MapDataset.source(batches)[first:stop].to_iter_dataset(threads)
        if num_workers:
            dataset = dataset.mp_prefetch(grain.MultiprocessingOptions(num_workers, prefetch_factor))
        self.next, self.stop = first, stop
        self._iterators = [iter(dataset)]
        # Runs at exit too, while the modules that ending a worker needs still exist.
        self._end = weakref.finalize(self, _close, self._iterators)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            batch = next(self._iterators[0])
        except Exception:
            self.stop = self.next  # a failed reader is not to be read from again
            raise
        self.next += 1
        return batch

    def close(self) -> None:
        """Ends the threads and processes."""
        self._end()


def _close(iterators: list[Any]) -> None:
    while iterators:
        iterators.pop().close()
