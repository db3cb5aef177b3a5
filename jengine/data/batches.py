"""Batches by index.

Batch i in epoch e has the index e * length + i. Any index can be fetched on its own, so threads and
worker processes can fetch different batches, and a resumed run continues at once.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np

from jengine.config.errors import ConfigError
from jengine.config.registry import is_built_in
from jengine.data.collate import UnequalSamplesError, default_collate, to_numpy
from jengine.data.host_entries import Batch, Sample
from jengine.data.masking import with_mask
from jengine.data.samplers import IteratedSampler, Sampler


class Samples(Protocol):
    """Dataset with access by index."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Sample: ...


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
        _, indices, num_real = (
            loaded if loaded is not None and loaded[0] == epoch else self.load_epoch(epoch)
        )
        start = position * self.batch_size
        examples = indices[start : start + self.batch_size]
        mask = np.arange(start, start + self.batch_size) < num_real
        if self.is_whole:  # the mask is used here and not passed on: a short batch stays short
            return to_numpy(self._fetch(epoch, examples[mask]))
        batch = self._fetch(epoch, examples)
        return with_mask(batch, mask) if self.masked else batch

    def load_epoch(self, epoch: int) -> tuple[int, np.ndarray, int]:
        """Make `epoch` the current one.

        Return the number, the sample indices, int64[N], and how many are real.
        """
        shift = self.shift[1] if self.shift[0] == epoch or self.order.is_endless else 0
        count = self.length * self.batch_size
        if self.order.is_endless:
            sections = [self.order.indices(epoch, count)[shift:]]
            sections += [self.order.indices(epoch + 1, count)[:shift]] if shift else []
            self._epoch = (epoch, np.concatenate(sections), count)
            return self._epoch
        indices = self.order.indices(epoch, count + shift)
        num_real = min(len(indices), self.order.num_real(count + shift)) - shift
        # With a negative shift the first batches have been yielded already: anything may stand in
        # their place.
        indices = (
            np.concatenate([np.repeat(indices[:1], -shift), indices])
            if shift < 0
            else indices[shift:]
        )
        if missing := count - len(indices):
            padding = np.full(missing, indices[0] if len(indices) else 0, indices.dtype)
            indices = np.concatenate([indices, padding])
        self._epoch = (epoch, indices, num_real)
        return self._epoch

    def _fetch(self, epoch: int, indices: np.ndarray) -> Batch:
        dataset = self.dataset
        if hasattr(dataset, "at_epoch"):  # it draws random numbers
            dataset = dataset.at_epoch(epoch)
        if hasattr(dataset, "__getitems__") and not self._collates_samples:
            fetched = dataset.__getitems__(indices)
            # In PyTorch `__getitems__` returns a list of samples; here it may also return the
            # batch.
            if isinstance(fetched, list):
                return self.collate(fetched)
            if self.collate is default_collate:
                return fetched
            if not hasattr(dataset, "__getitem__"):
                raise ConfigError(
                    f"`collate_fn` must be None for {type(self.dataset).__name__}, whose "
                    "__getitems__ returns the batch and which has no __getitem__ for its samples"
                )
            self._collates_samples = True  # the next batches are not read twice
        samples = [_read(dataset, index) for index in indices.tolist()]
        try:
            return self.collate(samples)
        except UnequalSamplesError as error:
            error.source = f" (sample {indices[error.index]} of {type(dataset).__name__})"
            code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
            if code is not None and not is_built_in(type(dataset)):
                error.add_note(
                    f"returned by __getitem__ at {code.co_filename}:{code.co_firstlineno}"
                )
            raise


def _read(dataset: Samples, index: int) -> Sample:
    try:
        return dataset[index]
    except Exception as error:
        # Dicts and tables with other keys have a length too, and fail only here.
        hint = ", which must have the samples 0 to N - 1" if isinstance(error, KeyError) else ""
        error.add_note(f"in sample {index} of {type(dataset).__name__}{hint}")
        raise
