"""Loader for map-style datasets, which starts at any position in any epoch in constant time."""

import copy
import operator
from collections.abc import Callable, Iterator, Sequence
from typing import Annotated, Any, Literal

import numpy as np

from jengine.config.annotations import ConfigOf, Count, Index, checked
from jengine.config.errors import ConfigError
from jengine.config.registry import DATA_SAMPLERS, DATASETS
from jengine.data.batch_check import BatchRules, batch_settings
from jengine.data.batch_prefetcher import BatchPrefetcher
from jengine.data.batches import BatchSource
from jengine.data.collate import default_collate
from jengine.data.find_source import require_map_style
from jengine.data.host_entries import Batch, Sample
from jengine.data.pipeline import set_length
from jengine.data.samplers import DefaultSampler, IteratedSampler, Sampler
from jengine.data.sources import Resume
from jengine.data.step_values import FollowsSteps, StepValues


@checked
class DataLoader(FollowsSteps):
    """Loader that yields one epoch's batches as numpy pytrees.

    Batch i in epoch e is a pure function of (e, i), so a resumed run continues at any position at
    once. Without threads and workers a batch is fetched in the calling thread, which is cheap for
    arrays in memory; with them batches are built ahead, in the same order. The processes are
    grain's (https://google-grain.readthedocs.io).

    >>> loader = DataLoader([{"x": i} for i in range(4)], batch_size=2)
    >>> loader.set_epoch(0, start=1)
    >>> next(iter(loader))["x"]
    array([2, 3])

    Args:
      dataset: has `__len__` and `__getitem__(i)` -> sample (pytree), or `__getitems__(indices)` ->
        the whole batch (or a list of samples), which is called once per batch. With a `collate_fn`
        it must return samples, or `__getitem__` is called for each.
      batch_size: examples per batch on this process.
      sampler: the sample order, any iterable of indices with a length; None for the dataset's
        order.
      drop_last: whether the last, smaller batch is dropped. When False it is padded by repeating
        samples, and every batch gets a mask, bool[batch_size], True for a real example: a dict the
        entry `mask`, a tuple or list the attribute `mask` (see `MaskedTuple`).
      num_workers: worker processes that build batches. Dataset and `collate_fn` must then pickle,
        and the script needs `if __name__ == "__main__":`. Workers start once, and stay alive until
        `close`.
      num_threads: threads that build batches (in each worker, if there are any), for datasets that
        read files.
      prefetch_factor: batches that each worker, or each thread, builds ahead.
      collate_fn: list of samples -> batch; None stacks them.
      num_batch_per_epoch: maximum number of batches per epoch, for a quick test.
      device_prefetch: batches that a loop sends to the device ahead of the current one; each takes
        device memory.
      batch_axis: None passes a batch on as it is: any pytree, without padding and mask, the same on
        all processes. Without a `batch_size` each sample is a batch then. With 0, all arrays have
        the examples along their first axis.
      batch_rules: with `batch_axis=None`, which entries are sharded over the devices; see
        `batch_settings`.

    Attributes:
      batch_size: examples per batch; None if each sample is a batch.
      length: number of batches in an epoch.
      batch_sizes, example_lengths: numbers that change with the iteration, see `follow`.

    Raises:
      TypeError: the dataset is not map-style. ValueError: a number out of range, or a dataset
        smaller than one batch.
    """

    has_random_access = True  # any process can continue at any example
    _size: int
    advice = "use a sampler of jengine.data, whose order is a function of the seed and the epoch"

    def __init__(
        self,
        dataset: Annotated[Any, ConfigOf(DATASETS)],
        batch_size: Count | None = None,
        sampler: Annotated[Any, ConfigOf(DATA_SAMPLERS, "dataset")] = None,
        drop_last: bool = False,
        num_workers: Index = 0,
        num_threads: Index = 0,
        prefetch_factor: Count = 2,
        collate_fn: Callable[[Sequence[Sample]], Batch] | None = None,
        num_batch_per_epoch: Count | None = None,
        device_prefetch: Index = 2,
        batch_axis: Literal[0] | None = 0,
        batch_rules: BatchRules | None = None,
    ) -> None:
        require_map_style(dataset)
        self.batch_axis, self.batch_rules = batch_settings(batch_axis, batch_rules)
        self.batch_size = batch_size
        if batch_size is None:
            if self.batch_axis == 0:
                raise TypeError("DataLoader needs the argument 'batch_size'")
            if collate_fn is not None:
                raise ConfigError(
                    "`collate_fn` must be given with `batch_size`: without it each sample is a "
                    "batch"
                )
            batch_size = 1
            collate_fn = operator.itemgetter(0)
        if batch_size >= 2**31:
            raise ConfigError(
                f"`batch_size` must be below 2**31, the largest axis of an array, got {batch_size}"
            )
        self.dataset = dataset
        self._size = batch_size
        self.drop_last = drop_last
        self.num_workers = num_workers
        self.num_threads = num_threads
        self.prefetch_factor = prefetch_factor
        self.device_prefetch = device_prefetch
        self.sampler = DefaultSampler(dataset, shuffle=False) if sampler is None else sampler
        self._order = (
            self.sampler if isinstance(self.sampler, Sampler) else IteratedSampler(self.sampler)
        )
        self.kind = f"DataLoader({type(dataset).__name__})"
        self.resume: Resume = "replayed" if isinstance(self._order, IteratedSampler) else "exact"
        self._max_batches = num_batch_per_epoch
        self._apply()
        if self.length == 0:
            samples = self._order.samples_per_epoch(drop_last)
            raise ValueError(
                f"the dataset must have at least one batch: got {samples} samples and batch_size "
                f"{batch_size}; use a smaller batch_size, or drop_last=False, which fills it with "
                "repeated samples without weight"
            )
        self._collate = collate_fn or default_collate
        self._epoch = self._start = self._position = 0
        self._shift = (0, 0)  # an epoch, and the examples by which its batches are shifted
        self._prefetcher: BatchPrefetcher | None = None

    def __len__(self) -> int:
        return self.length

    @property
    def dataset_size(self) -> int:
        """The number of samples in the dataset."""
        return len(self.dataset)

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration yields."""
        return self._order.epoch  # a hook may have set it on the sampler, as in MMEngine

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Start the next iteration at batch `start` in `epoch`, without reading the batches
        before.
        """
        if not 0 <= start <= self.length:
            raise ValueError(
                f"start must be a position in the epoch, 0 to {self.length}, got {start}"
            )
        self._order.set_epoch(epoch)
        self._epoch = epoch
        self._start = start
        self._position = start
        self._shift = (epoch, self._shift[1] if self._order.is_endless else 0)

    def follow(self, batch_sizes: StepValues | None, example_lengths: StepValues | None) -> None:
        """Let the batch size and the length of examples follow the iteration."""
        if batch_sizes is not None and (self.batch_axis is None or self.batch_size is None):
            raise ConfigError(
                "`batch_size` must be one number with batch_axis=None, got StepValues"
            )
        samples = self._order.samples_per_epoch(self.drop_last)
        largest = self._size if batch_sizes is None else max(batch_sizes.values)
        if self.drop_last and largest > samples:
            raise ConfigError(
                f"`batch_size` must be at most the {samples} samples of the dataset, got {largest}"
            )
        super().follow(batch_sizes, example_lengths)

    def _apply(self) -> None:
        if self.example_length is not None:
            set_length(self.dataset, self.example_length)
        if self.batch_sizes is not None:
            self.batch_size = self._size
        samples = self._order.samples_per_epoch(self.drop_last)
        self.length = min(self._count_whole(samples), self._max_batches or samples)

    def __iter__(self) -> Iterator[Batch]:
        epoch = self.epoch
        start = self._start
        self._start = 0
        self._epoch = epoch
        self._position = start
        return self._batches(epoch, start)

    def state_dict(self) -> dict[str, int]:
        """Return the epoch, and how many batches and examples it has yielded.

        A caller that prefetches must keep each batch's state with it, as `BatchStream` does.
        """
        epoch = self._epoch
        position = self._position
        if position >= self.length:
            epoch = epoch + 1
            position = 0
        offset = self._shift[1] if self._shift[0] == epoch or self._order.is_endless else 0
        examples = position * self._size + offset
        # its epochs are sections of one stream, whose boundaries depend on the batch size
        if self._order.is_endless:
            examples += epoch * self.length * self._size
        return {"epoch": epoch, "position": position, "examples": examples}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Continue at the position from `state_dict`; with another batch size, at the same example.

        The rest of the epoch, or of an endless sampler's stream, is then divided into batches from
        that example on.
        """
        epoch = int(state["epoch"])
        examples = int(state["examples"])
        if self._order.is_endless:
            batches, offset = divmod(examples, self._size)
            self.set_epoch(*divmod(batches, self.length))
            self._shift = (self._epoch, offset)
            return
        remaining = self._count_whole(self._order.samples_per_epoch(self.drop_last) - examples)
        start, offset = divmod(examples, self._size)
        if offset:
            start = self.length - min(remaining, self.length)
        if remaining <= 0 or start >= self.length:
            epoch = epoch + 1
            start = 0
            examples = 0
        self.set_epoch(epoch, start)
        self._shift = (epoch, examples - start * self._size)

    def example(self) -> Batch:
        """Return the next epoch's first batch; the position does not change."""
        epoch = self.epoch
        first = epoch * self.length
        # not read here: a dataset that opens files at its first read cannot be pickled after it
        if self.num_workers:
            return next(self._source(epoch, first, first + self.length))
        return self._batch_source()[first]

    def sample_indices(self, epoch: int, position: int) -> np.ndarray:
        """Return the dataset's indices of the samples in a batch, int64[B]."""
        indices = self.copy_at_epoch(epoch)._batch_source().load_epoch(epoch)[1]
        return indices[position * self._size : (position + 1) * self._size]

    def copy_at_epoch(self, epoch: int) -> "DataLoader":
        """Return a loader for the same batches at the start of `epoch`.

        This one's position does not change.
        """
        other = copy.copy(self)
        other._order = copy.copy(self._order)  # which holds the epoch
        other._prefetcher = None  # it belongs to this loader
        other.set_epoch(epoch)
        return other

    def close(self) -> None:
        """End threads and worker processes, if there are any."""
        if self._prefetcher is not None:
            self._prefetcher.close()
            self._prefetcher = None

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        first = epoch * self.length + start
        end = (epoch + 1) * self.length
        source = self._source(epoch, first, end)
        for position in range(start, self.length):
            # Not kept in a variable: the batch of a worker stays in shared memory until its last
            # reference is gone.
            taken = [next(source)]
            self._position = position + 1
            yield taken.pop()

    def _source(self, epoch: int, first: int, end: int) -> Iterator[Batch]:
        """Return the batches from index `first` on, from the running threads and workers, if
        there are any.
        """
        prefetcher = self._prefetcher
        is_shifted = self._shift[1] or (prefetcher is not None and prefetcher.source.shift[1])
        if prefetcher is not None and first < prefetcher.stop and not is_shifted:
            # A pass that starts where the last one ended finds its batches built already. Without
            # shuffling the next pass has the same batches as this one, so what was built for either
            # serves both.
            distance = first - prefetcher.next
            if distance == 0 or (self._order.repeats and distance % self.length == 0):
                return prefetcher
            # The workers know the order of any epoch; that of foreign samplers only once it is
            # drawn.
            if isinstance(self._order, Sampler):
                prefetcher.seek(first)
                return prefetcher
        self.close()
        batches = self._batch_source()
        batches.load_epoch(epoch)  # not in a worker, where a foreign sampler may draw another order
        if not self.num_workers and not self.num_threads:
            return map(batches.__getitem__, range(first, end))
        stop = end if isinstance(self._order, IteratedSampler) or self._shift[1] else len(batches)
        self._prefetcher = BatchPrefetcher(
            batches, stop, self.num_workers, self.num_threads, self.prefetch_factor
        )
        self._prefetcher.seek(first)
        return self._prefetcher

    def _batch_source(self) -> BatchSource:
        return BatchSource(
            self.dataset,
            self._order,
            self._collate,
            self._size,
            self.length,
            masked=not self.drop_last and self.batch_axis == 0,
            is_whole=self.batch_axis is None,
            shift=self._shift,
        )

    def _count_whole(self, samples: int) -> int:
        """Return the number of batches in `samples` samples."""
        return samples // self._size if self.drop_last else -(-samples // self._size)
