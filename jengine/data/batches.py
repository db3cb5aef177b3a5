"""Batches by index.

Batch i in epoch e has the index e * length + i. Any index can be fetched on its own, so threads and
worker processes can fetch different batches, and a resumed run continues at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from jengine.config.errors import ConfigError
from jengine.config.explain import explained
from jengine.data.collate import default_collate, to_numpy
from jengine.data.host_entries import Batch, Sample
from jengine.data.masking import with_mask
from jengine.data.samplers import IteratedSampler, Sampler

# More epochs than any run has; grain requires the length of a source.
_MAX_EPOCHS = 2**24


@dataclasses.dataclass(eq=False, repr=False)
class BatchSource:
    """Random access to batches. It can be pickled if the dataset, the sampler and `collate` can."""

    dataset: Any  # has `__getitems__(indices)` or `__getitem__(index)`
    order: Sampler | IteratedSampler
    # with the default one, batches of `__getitems__` stay as they are
    collate: Callable[[Sequence[Sample]], Batch]
    batch_size: int
    length: int  # batches per epoch
    # whether short batches are padded and every batch gets a mask for the real examples
    masked: bool
    is_whole: bool = False  # whether short batches stay short
    # An epoch, and the number of examples by which it is shifted, maybe negative; of an endless
    # sampler all are shifted
    shift: tuple[int, int] = (0, 0)
    _epoch: tuple[int, np.ndarray, int] | None = None
    _collates_samples: bool = False  # one by one, because `__getitems__` returns batches

    def __len__(self) -> int:
        return self.length * _MAX_EPOCHS

    def __repr__(self) -> str:
        return f"BatchSource({type(self.dataset).__name__}, batch_size={self.batch_size})"

    def __getitem__(self, index: int) -> Batch:
        epoch, position = divmod(index, self.length)
        loaded = self._epoch
        if loaded is None or loaded[0] != epoch:
            loaded = self.load_epoch(epoch)
        _, indices, num_real = loaded
        dataset = self.dataset
        if hasattr(dataset, "at_epoch"):
            dataset = dataset.at_epoch(epoch)
        start = position * self.batch_size
        examples = indices[start : start + self.batch_size]
        if self.is_whole:  # a short batch stays short
            examples = examples[: max(num_real - start, 0)]
        # In PyTorch `__getitems__` returns a list of samples; here it may also return the batch.
        fetched: Any = []
        if hasattr(dataset, "__getitems__") and not self._collates_samples:
            fetched = dataset.__getitems__(examples)
        batch = (
            fetched
            if not isinstance(fetched, list) and self.collate is default_collate
            else self._collate(dataset, examples, fetched)
        )
        if self.is_whole:
            return to_numpy(batch)
        if not self.masked:
            return batch
        return with_mask(batch, np.arange(start, start + self.batch_size) < num_real)

    def load_epoch(self, epoch: int) -> tuple[int, np.ndarray, int]:
        """Make `epoch` the current one.

        Return the number, the sample indices, int64[N], and how many are real.
        """
        shift = self.shift[1] if self.shift[0] == epoch or self.order.is_endless else 0
        num_real = count = self.length * self.batch_size
        if self.order.is_endless:
            indices = self.order.indices(epoch, count)[shift:]
            if shift:
                indices = np.concatenate([indices, self.order.indices(epoch + 1, count)[:shift]])
        else:
            indices = self.order.indices(epoch, count + shift)
            num_real = min(len(indices), self.order.num_real(count + shift)) - shift
            # With a negative shift the first batches have been yielded already: anything may stand
            # in their place.
            before = np.repeat(indices[:1], max(-shift, 0))
            indices = np.concatenate([before, indices[max(shift, 0) :]])
            padding = np.repeat(indices[:1] if len(indices) else [0], count - len(indices))
            indices = np.concatenate([indices, padding.astype(indices.dtype)])
        self._epoch = (epoch, indices, num_real)
        return self._epoch

    def _collate(self, dataset: Any, indices: np.ndarray, samples: Any) -> Batch:
        """Collate the samples, which are read here unless `__getitems__` has returned a list."""
        if not isinstance(samples, list):
            if not hasattr(dataset, "__getitem__"):
                raise ConfigError(
                    f"`collate_fn` must be None for {type(self.dataset).__name__}, whose "
                    "__getitems__ returns the batch and which has no __getitem__ for its samples"
                )
            self._collates_samples = True  # the next batches are not read twice
            samples = []
        samples = samples or [_read(dataset, index) for index in indices.tolist()]
        with explained(samples=samples, indices=indices):
            return self.collate(samples)


def _read(dataset: Any, index: int) -> Sample:
    try:
        return dataset[index]
    except Exception as error:
        # Dicts and tables with other keys have a length too, and fail only here.
        hint = ", which must have the samples 0 to N - 1" if isinstance(error, KeyError) else ""
        error.add_note(f"in sample {index} of {type(dataset).__name__}{hint}")
        raise
