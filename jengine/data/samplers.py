"""The order of the samples: a pure function of the seed and the epoch, alike on all processes and after a restart."""

import abc
import itertools
from collections.abc import Iterator, Sized
from typing import Any

import numpy as np

from jengine.annotations import Count, Index
from jengine.registry import DATA_SAMPLERS


class Sampler(abc.ABC):
    """An order that depends on nothing but seed and epoch, so that any process can tell it for any epoch.

    Args:
      dataset: the dataset, or its length.
      shuffle: whether the order is a new permutation in each epoch.
      seed: seed of the permutations; the same on all processes. None is 0.
      process_index: the shard that this process reads, 0 up to `process_count` - 1.
      process_count: how many processes share the dataset.

    Raises:
      ValueError: an empty dataset, or a process index outside its range.
    """

    def __init__(
        self,
        dataset: Sized | int,
        shuffle: bool = True,
        seed: int | None = None,
        process_index: Index = 0,
        process_count: Count = 1,
    ) -> None:
        self.size = dataset if isinstance(dataset, int) else len(dataset)
        if self.size < 1:
            raise ValueError("the dataset is empty: a sampler needs at least one sample")
        if not 0 <= process_index < process_count:
            raise ValueError(f"process_index is 0 to {process_count - 1}, found {process_index}")
        self.shuffle = shuffle
        self.seed = seed or 0
        self.process_index = process_index
        self.process_count = process_count
        self.epoch = 0

    def set_epoch(self, epoch: int) -> None:
        """Chooses the epoch whose order the next iteration yields."""
        self.epoch = epoch

    def permutation(self, epoch: int) -> np.ndarray:
        """The order of the whole dataset in `epoch`, before it is shared out: int64[size]."""
        if not self.shuffle:
            return np.arange(self.size)
        # RandomState's stream is frozen by NumPy's policy, default_rng's is not: a run resumed under another NumPy
        # release must see the same order.
        bits = np.random.MT19937(np.random.SeedSequence((self.seed % 2**64, epoch)))
        return np.random.RandomState(bits).permutation(self.size)

    @property
    def repeats(self) -> bool:
        """Whether all epochs are alike."""
        return False

    @abc.abstractmethod
    def samples_per_epoch(self, drop_last: bool) -> int:
        """How many samples an epoch has on *every* process, whole batches apart."""

    @abc.abstractmethod
    def num_real(self, count: int) -> int:
        """How many of the first `count` indices stand for a sample that no other process has: the rest is padding."""

    @abc.abstractmethod
    def indices(self, epoch: int, count: int) -> np.ndarray:
        """At most `count` indices of this process for `epoch`: int64[<= count]."""


@DATA_SAMPLERS.register_module()
class DefaultSampler(Sampler):
    """Every sample once per epoch; process p reads the p-th, (p + P)-th, (p + 2P)-th ... of the epoch's order.

    Args:
      dataset: the dataset, or its length.
      shuffle: whether the order is a new permutation in each epoch.
      seed: seed of the permutations; the same on all processes. None is 0.
      round_up: whether the first samples are repeated until all processes have equally many. When False, training
        leaves out what does not divide evenly. Evaluation is exact either way, for repeated samples are masked.
      process_index: the shard that this process reads.
      process_count: how many processes share the dataset.
    """

    def __init__(
        self,
        dataset: Sized | int,
        shuffle: bool = True,
        seed: int | None = None,
        round_up: bool = True,
        process_index: Index = 0,
        process_count: Count = 1,
    ) -> None:
        super().__init__(dataset, shuffle, seed, process_index, process_count)
        self.round_up = round_up

    @property
    def repeats(self) -> bool:
        """Whether all epochs are alike."""
        return not self.shuffle

    def samples_per_epoch(self, drop_last: bool) -> int:
        """The share of the process that has most, or, where nothing may be padded, of the one that has least."""
        up = self.round_up or not drop_last
        return -(-self.size // self.process_count) if up else self.size // self.process_count

    def num_real(self, count: int) -> int:
        """The share without repeated samples, `count` at most."""
        return min(count, len(range(self.process_index, self.size, self.process_count)))

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """The first `count` indices of this process's share of `epoch`: int64[<= count]."""
        order = self.permutation(epoch)
        if self.round_up:
            order = np.resize(order, -(-self.size // self.process_count) * self.process_count)
        return order[self.process_index :: self.process_count][:count]

    def __iter__(self) -> Iterator[int]:
        return iter(self.indices(self.epoch, self.size).tolist())

    def __len__(self) -> int:
        return (
            len(range(self.process_index, self.size, self.process_count))
            if not self.round_up
            else (-(-self.size // self.process_count))
        )


@DATA_SAMPLERS.register_module()
class InfiniteSampler(Sampler):
    """One permutation after another without end, for loops that count iterations: batches run across the borders.

    An epoch of the loader is then a stretch of this stream, so that no sample is left out however the batches fall,
    and resuming at any iteration computes its place instead of reading up to it. Arguments are those of `Sampler`.
    """

    def samples_per_epoch(self, drop_last: bool) -> int:
        """An equal share of the dataset, rounded up."""
        return -(-self.size // self.process_count)

    def num_real(self, count: int) -> int:
        """`count`: the stream never ends."""
        return count

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """The `epoch`-th stretch of `count` indices of this process's stream: int64[count]."""
        # The k-th index of process p is the (p + k * P)-th of the common stream.
        places = self.process_index + self.process_count * np.arange(epoch * count, (epoch + 1) * count)
        rounds, offsets = np.divmod(places, self.size)
        first, last = int(rounds[0]), int(rounds[-1])
        orders = np.stack([self.permutation(k) for k in range(first, last + 1)])
        return orders[rounds - first, offsets]

    def __iter__(self) -> Iterator[int]:
        stretch = self.samples_per_epoch(drop_last=False)
        for epoch in itertools.count(self.epoch):
            yield from self.indices(epoch, stretch).tolist()

    def __len__(self) -> int:
        return self.samples_per_epoch(drop_last=False)


class IteratedSampler:
    """A sampler of another library (sized, iterable, perhaps with `set_epoch`) seen as the loader needs it.

    Args:
      sampler: the sampler; it shares the dataset out between the processes itself.
    """

    repeats = False

    def __init__(self, sampler: Any) -> None:
        if not hasattr(sampler, "__iter__") or not hasattr(sampler, "__len__"):
            raise TypeError(f"a sampler is an iterable of indices with a length, found {type(sampler).__name__}")
        self.sampler = sampler

    def set_epoch(self, epoch: int) -> None:
        """Forwards the epoch where the sampler wants it."""
        if hasattr(self.sampler, "set_epoch"):
            self.sampler.set_epoch(epoch)

    def samples_per_epoch(self, drop_last: bool) -> int:
        """The length of the sampler."""
        return len(self.sampler)

    def num_real(self, count: int) -> int:
        """`count`, the length of the sampler at most."""
        return min(count, len(self.sampler))

    def indices(self, epoch: int, count: int) -> np.ndarray:
        """One pass over the sampler, at whatever epoch it was told last: int64[<= count]."""
        return np.fromiter(itertools.islice(self.sampler, count), dtype=np.int64)
