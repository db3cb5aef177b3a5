"""Load batches of a map-style dataset, from any position of any epoch, in constant time."""

import copy
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any

from jengine.annotations import ConfigOf, Count, Index, checked
from jengine.data.batches import BatchPrefetcher, BatchSource
from jengine.data.collate import default_collate
from jengine.data.samplers import DefaultSampler, IteratedSampler, Sampler
from jengine.registry import DATA_SAMPLERS, DATASETS


@checked
class DataLoader:
    """Yield the batches of one epoch as numpy pytrees.

    Batch i of epoch e is a pure function of (e, i), so a resumed run continues at any position at once. Without threads
    and workers a batch is fetched in the calling thread, which is cheap for arrays in memory; with them grain
    (https://google-grain.readthedocs.io) prefetches, in the same order.

    Args:
      dataset: has `__len__` and `__getitem__(i)` -> sample (pytree), or `__getitems__(indices)` -> the whole batch
        (or a list of samples), which is called once per batch.
      batch_size: examples per batch on this process.
      sampler: the order of the samples, any iterable of indices with a length; None for the order of the dataset.
      drop_last: whether the last, smaller batch is dropped. When False it is padded by repeating samples, and every
        batch, which must be a dict, gets `mask`: bool[batch_size], True for a real example.
      num_workers: worker processes that build batches. Dataset and `collate_fn` must then pickle, and the script
        needs `if __name__ == "__main__":`. Workers start once, and stay alive until `close`.
      num_threads: threads that build batches (in each worker, if there are any), for datasets that read files.
      prefetch_factor: batches that each worker, or each thread, builds ahead.
      collate_fn: list of samples -> batch; None stacks them.
      num_batch_per_epoch: maximum number of batches per epoch, for a quick test.
      device_prefetch: batches that a loop sends to the device ahead of the current one; each takes device memory.

    Raises:
      TypeError: the dataset is not map-style. ValueError: a number out of range, or a dataset smaller than one batch.
    """

    def __init__(
        self,
        dataset: Annotated[Any, ConfigOf(DATASETS)],
        batch_size: Count,
        sampler: Annotated[Any, ConfigOf(DATA_SAMPLERS, "dataset")] = None,
        drop_last: bool = False,
        num_workers: Index = 0,
        num_threads: Index = 0,
        prefetch_factor: Count = 2,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        num_batch_per_epoch: Count | None = None,
        device_prefetch: Index = 2,
    ) -> None:
        if not hasattr(dataset, "__len__") or not (hasattr(dataset, "__getitem__") or hasattr(dataset, "__getitems__")):
            raise TypeError(f"a dataset must have __len__ and __getitem__, got {type(dataset).__name__}")
        self.dataset = dataset
        self.batch_size = batch_size
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.num_threads = num_threads
        self.prefetch_factor = prefetch_factor
        self.device_prefetch = device_prefetch
        self.sampler = DefaultSampler(dataset, shuffle=False) if sampler is None else sampler
        self._order = self.sampler if isinstance(self.sampler, Sampler) else IteratedSampler(self.sampler)
        self._length = self._count_batches(num_batch_per_epoch)
        self._collate = collate_fn or default_collate
        self._epoch = self._start = self._position = 0
        self._prefetcher: BatchPrefetcher | None = None

    def __len__(self) -> int:
        return self._length

    @property
    def metainfo(self) -> Any:
        """The metainfo of the dataset (class names and so on); None if it has none."""
        return getattr(self.dataset, "metainfo", None)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields."""
        return self._order.epoch  # a hook may have set it on the sampler, as in MMEngine

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Start the next iteration at batch `start` of `epoch`, without reading the batches before.

        Raises:
          ValueError: `start` is outside the epoch.
        """
        if not 0 <= start <= self._length:
            raise ValueError(f"start must be a position in the epoch, 0 to {self._length}, got {start}")
        self._order.set_epoch(epoch)
        self._epoch, self._start, self._position = epoch, start, start

    def __iter__(self) -> Iterator[Any]:
        epoch = self.epoch
        start, self._start = self._start, 0
        self._epoch, self._position = epoch, start
        return self._batches(epoch, start)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and the number of batches yielded in it.

        A caller that prefetches (`prefetch_to_device`) must count consumed batches itself.
        """
        if self._position >= self._length:
            return {"epoch": self._epoch + 1, "position": 0}
        return {"epoch": self._epoch, "position": self._position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position that `state_dict` returned."""
        self.set_epoch(int(state["epoch"]), int(state["position"]))

    def copy_at_epoch(self, epoch: int) -> "DataLoader":
        """Return a loader of the same batches at the start of `epoch`; the position of this one does not change."""
        other = copy.copy(self)
        other._order = copy.copy(self._order)
        other._prefetcher = None
        other.set_epoch(epoch)
        return other

    def close(self) -> None:
        """End threads and worker processes, if there are any."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _batches(self, epoch: int, start: int) -> Iterator[Any]:
        first, end = epoch * self._length + start, (epoch + 1) * self._length
        source = self._source(epoch, first, end)
        for _ in range(start, self._length):
            # Not kept in a variable: the batch of a worker stays in shared memory until its last reference is gone.
            yield self._count(next(source))

    def _count(self, batch: Any) -> Any:
        self._position += 1
        return batch

    def _source(self, epoch: int, first: int, end: int) -> Iterator[Any]:
        """Return the batches from index `first` on, from the threads and workers that are running, if there are any."""
        prefetcher = self._prefetcher
        if prefetcher is not None and first < prefetcher.stop:
            distance = first - prefetcher.next
            if distance == 0 or (self._order.repeats and distance % self._length == 0):
                return prefetcher
            if isinstance(self._order, Sampler):
                prefetcher.seek(first)
                return prefetcher
        self.close()
        batches = BatchSource(
            self.dataset, self._order, self._collate, self.batch_size, self._length, masked=not self.drop_last
        )
        batches.load_epoch(epoch)  # not in a worker, where a foreign sampler may draw another order
        if not self.num_workers and not self.num_threads:
            return map(batches.__getitem__, range(first, end))
        stop = end if isinstance(self._order, IteratedSampler) else len(batches)
        self._prefetcher = BatchPrefetcher(batches, stop, self.num_workers, self.num_threads, self.prefetch_factor)
        self._prefetcher.seek(first)
        return self._prefetcher

    def _count_batches(self, limit: int | None) -> int:
        samples = self._order.samples_per_epoch(self.drop_last)
        batches = samples // self.batch_size if self.drop_last else -(-samples // self.batch_size)
        if batches == 0:
            raise ValueError(
                f"the dataset must have at least one batch: got {samples} samples on this process and batch_size "
                f"{self.batch_size}; use a smaller batch_size, or drop_last=False to pad"
            )
        return batches if limit is None else min(batches, limit)
