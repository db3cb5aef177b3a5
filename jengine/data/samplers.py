"""Samplers whose order is a pure function of the seed and the epoch, also after a restart."""

import abc
import itertools
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from jengine.config.annotations import Count, Index
from jengine.config.registry import DATA_SAMPLERS


def random_state(seed: int, *position: int) -> np.random.RandomState:
    """Return the random generator for an epoch, or for a sample in an epoch."""
    # NumPy guarantees the stream of RandomState, but not that of default_rng: a run resumed with
    # another NumPy release must have the same order.
    seeds = np.random.SeedSequence((seed % 2**64, *map(int, position)))
    return np.random.RandomState(np.random.MT19937(seeds))


class Sampler(abc.ABC):
    """Sample order from seed and epoch alone, so that any process can compute it for any epoch.

    Args:
      dataset: the dataset, or its length.
      shuffle: whether each epoch has a new permutation.
      seed: seed for the permutations, the same on all processes; None is 0.
      process_index: the shard that this process reads, 0 up to `process_count` - 1.
      process_count: number of processes that share the dataset.

    Raises:
      ValueError: an empty dataset, or a process index out of range.
    """

    is_endless = False  # whether epochs are sections of one stream of samples
    # the last permutation, and what it depends on
    _drawn: tuple[tuple[int, int, int], np.ndarray] | None = None

    def __init__(
        self,
        dataset: Sized | int,
        shuffle: bool = True,
        seed: Index | None = None,
        process_index: Index = 0,
        process_count: Count = 1,
    ) -> None:
        self.size = dataset if isinstance(dataset, int) else len(dataset)
        if self.size < 1:
            raise ValueError("the dataset must have at least one sample, got an empty one")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index must be 0 to {process_count - 1}, got {process_index}")
        # The same seed in all processes: each draws the whole permutation and takes its share, so
        # that shares are disjoint.
        self.shuffle = shuffle
        self.seed = seed or 0
        self.epoch = 0
        self.process_index = process_index
        self.process_count = process_count

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch for the next iteration."""
        self.epoch = epoch

    def permutation(self, epoch: int) -> np.ndarray:
        """Return the whole dataset's order in `epoch`, before it is divided over processes:
        int64[size].
        """
        if not self.shuffle:
            return np.arange(self.size)
        key = self.size, self.seed, epoch
        # The first batch is read several times before the first pass, and millions of examples take
        # a second.
        if self._drawn is None or self._drawn[0] != key:
            self._drawn = key, random_state(self.seed, epoch).permutation(self.size)
        return self._drawn[1].copy()

    def __getstate__(self) -> dict[str, Any]:
        """Return the attributes without the permutation, which a worker process draws itself."""
        return {**vars(self), "_drawn": None}

    @property
    def repeats(self) -> bool:
        """True if all epochs have the same order."""
        return False

    @abc.abstractmethod
    def samples_per_epoch(self, drop_last: bool) -> int:
        """Return the number of samples per epoch, the same on all processes, before division
        into batches.
        """

    @abc.abstractmethod
    def num_real(self, count: int) -> int:
        """Return how many of the first `count` indices are not padding, which repeats samples
        from other processes.
        """

    @abc.abstractmethod
    def indices(self, epoch: int, count: int) -> np.ndarray:
        """Return at most `count` indices for this process in `epoch`: int64[<= count]."""


@DATA_SAMPLERS.register_module()
class DefaultSampler(Sampler):
    """Sampler that yields every sample once per epoch.

    With P processes, p reads the p-th, (p + P)-th ... in order.

    >>> list(DefaultSampler(5, shuffle=False, process_index=1, process_count=2))
    [1, 3, 0]

    The other arguments are those of `Sampler`.

    Args:
      round_up: whether the first samples are repeated until all processes have equally many. When
        False, training drops the remainder. Evaluation is exact either way, since repeated samples
        are masked.
    """

    def __init__(
        self,
        dataset: Sized | int,
        shuffle: bool = True,
        seed: Index | None = None,
        round_up: bool = True,
        process_index: Index = 0,
        process_count: Count = 1,
    ) -> None:
        super().__init__(dataset, shuffle, seed, process_index, process_count)
        self.round_up = round_up

    @property
    def repeats(self) -> bool:
        """True if all epochs have the same order."""
        return not self.shuffle

    def samples_per_epoch(self, drop_last: bool) -> int:
        """Return the largest shard's size, or the smallest's if samples may not be repeated."""
        up = self.round_up or not drop_last
        return -(-self.size // self.process_count) if up else self.size // self.process_count

    def num_real(self, count: int) -> int:
        """Return the shard's size without repeated samples, at most `count`."""
        return min(count, len(range(self.process_index, self.size, self.process_count)))

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """Return the shard's first `count` indices in `epoch`: int64[<= count]."""
        order = self.permutation(epoch)
        if (
            self.round_up
            and (rounded := -(-self.size // self.process_count) * self.process_count) > self.size
        ):
            order = np.resize(order, rounded)  # repeats the first
        return order[self.process_index :: self.process_count][:count]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.epoch, self.size).tolist())

    def __len__(self) -> int:
        return self.samples_per_epoch(False) if self.round_up else self.num_real(self.size)


@DATA_SAMPLERS.register_module()
class InfiniteSampler(Sampler):
    """Sampler that yields one permutation after another without end, for loops that count
    iterations.

    Batches cross the boundaries between permutations, so no sample is dropped. A loader's epoch is
    a section of this stream; resuming computes the position in it instead of reading up to it. The
    arguments are those of `Sampler`.
    """

    is_endless = True

    def samples_per_epoch(self, drop_last: bool) -> int:
        """Return an equal shard's size, rounded up."""
        return -(-self.size // self.process_count)

    def num_real(self, count: int) -> int:
        """Return `count`: the stream never ends."""
        return count

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """Return section number `epoch`, with `count` indices, in this process's stream:
        int64[count].
        """
        # The k-th index of process p is the (p + k * P)-th of the common stream.
        positions = self.process_index + self.process_count * np.arange(
            epoch * count, (epoch + 1) * count
        )
        rounds, offsets = np.divmod(positions, self.size)
        first = int(rounds[0])
        last = int(rounds[-1])
        orders = np.stack([self.permutation(k) for k in range(first, last + 1)])
        return orders[rounds - first, offsets]

    def __iter__(self) -> Iterator[int]:
        count = self.samples_per_epoch(drop_last=False)
        for epoch in itertools.count(self.epoch):
            yield from self.indices(epoch, count).tolist()

    def __len__(self) -> int:
        return self.samples_per_epoch(drop_last=False)


class IteratedSampler:
    """Adapter for a foreign sampler: sized, iterable, optionally with `set_epoch`.

    Args:
      sampler: the sampler, which must divide the dataset over the processes itself.
    """

    repeats = False
    is_endless = False

    def __init__(self, sampler: Any) -> None:
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise TypeError(
                "`sampler` must be an iterable of indices with a length, got "
                f"{type(sampler).__name__}"
            )
        self.sampler = sampler
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch, also in the sampler if it has `set_epoch`."""
        self.epoch = epoch
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def samples_per_epoch(self, drop_last: bool) -> int:
        """Return the sampler's length."""
        return len(self.sampler)

    def num_real(self, count: int) -> int:
        """Return `count`, at most the sampler's length."""
        return min(count, len(self.sampler))

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """Return the indices from one pass, in the epoch that was set last: int64[<= count]."""
        return np.fromiter(itertools.islice(self.sampler, count), dtype=np.int64)
