"""Loader for other libraries' data, with the interface of `DataLoader`: batches, or examples to
batch.
"""

import copy
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import jax
import numpy as np

from jengine.config.errors import ConfigError
from jengine.config.explain import explained
from jengine.data.batch_check import BatchRules, batch_settings
from jengine.data.collate import count_examples, default_collate, pad_examples, to_numpy
from jengine.data.find_source import as_source, set_epoch
from jengine.data.host_entries import Batch, Sample, select_arrays
from jengine.data.masking import with_mask
from jengine.data.sources import Pass
from jengine.data.step_values import FollowsSteps, StepValues

State = dict[str, Any]
_END = object()


def divide_rows(batch: Batch, length: int) -> Batch:
    """Return a batch whose rows, array[B, N, ...], are divided into rows with `length` entries, [B
    * N / length, ...].

    >>> divide_rows({"tokens": np.arange(8).reshape(2, 4)}, 2)["tokens"].tolist()
    [[0, 1], [2, 3], [4, 5], [6, 7]]

    Raises:
      ConfigError: an array without such rows.
    """

    def divide(leaf: np.ndarray) -> np.ndarray:
        if np.ndim(leaf) < 2 or leaf.shape[1] % length:
            raise ConfigError(
                f"`example_length` must divide the rows of each array, got {length} for "
                f"{np.shape(leaf)}"
            )
        return leaf.reshape(-1, length, *leaf.shape[2:])

    return jax.tree.map(divide, batch)


class IterableLoader(FollowsSteps):
    """Loader for data that are iterated: streams, loaders and datasets from other libraries.

    Foreign arrays become NumPy arrays, lists of strings NumPy arrays of strings. The data may be a
    grain `DataLoader`, `MapDataset` or `IterDataset`, a PyTorch `DataLoader`, a `tf.data.Dataset`
    or `tfds.as_numpy` of it, a stream from Hugging Face `datasets`, a list of batches, a generator
    function, or any other iterable.

    >>> loader = IterableLoader(({"x": i} for i in range(5)), train=True, batch_size=2)
    >>> [batch["x"].tolist() for batch in loader]
    [[0, 1], [2, 3]]

    Args:
      iterable: yields batches; examples if `batch_size` is given.
      train: whether a smaller last batch is dropped. When False it is padded, and every batch gets
        `mask`: bool[B], True for a real example.
      batch_size: number of examples to stack to a batch; None if `iterable` yields batches.
      collate_fn: list of examples -> batch; None stacks them.
      num_batch_per_epoch: maximum number of batches in a pass.
      device_prefetch: batches that a loop sends to the device ahead of the current one; None for
        the iterable's attribute with that name, or 2.
      batch_axis, batch_rules: see `DataLoader`; by default those that `iterable` has as attributes.
      process_index, process_count: this process and how many share the examples; with P processes,
        p reads the p-th, (p + P)-th ... example. Batches are not divided: each process should yield
        its own.

    Attributes:
      source: how the data are read, and whether their position can be saved; `kind`, `resume` and
        `advice` are from it.
      is_batched: whether `iterable` yields batches.

    Raises:
      ConfigError: data that cannot be iterated. ValueError: no batches.
    """

    has_random_access = False  # each process reads its own share

    def __init__(
        self,
        iterable: Any,
        train: bool,
        batch_size: int | None = None,
        collate_fn: Callable[[Sequence[Sample]], Batch] | None = None,
        num_batch_per_epoch: int | None = None,
        device_prefetch: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
        batch_axis: Literal[0] | None = 0,
        batch_rules: BatchRules | None = None,
    ) -> None:
        if batch_axis == 0:
            batch_axis = getattr(iterable, "batch_axis", 0)
            batch_rules = getattr(iterable, "batch_rules", batch_rules)
        self.batch_axis, self.batch_rules = batch_settings(batch_axis, batch_rules)
        if collate_fn is not None and not batch_size:
            raise ConfigError(
                "`collate_fn` must be given with `batch_size`: an iterable without it yields "
                "batches"
            )
        self.iterable = iterable
        self.train = train
        self.is_batched = not batch_size
        self.dataset = getattr(iterable, "dataset", iterable)
        self.sampler = getattr(iterable, "sampler", None)
        source = as_source(iterable)
        self.device_prefetch = (
            getattr(iterable, "device_prefetch", 2) if device_prefetch is None else device_prefetch
        )
        if type(self.device_prefetch) is not int or self.device_prefetch < 0:
            raise ConfigError(
                "`device_prefetch` must be an integer of at least 0, got "
                f"{self.device_prefetch!r} of {source.kind}"
            )
        self.process_index = process_index
        self.process_count = process_count
        # A library that can divide its data reads the other processes' examples not at all.
        is_divided = train and process_count > 1 and batch_size and self.batch_axis == 0
        sharded = source.shard(process_index, process_count) if is_divided else None
        self.source = source = sharded or source
        self.kind = source.kind
        self.advice = source.advice
        self.resume = source.resume
        reads_all = sharded is not None or self.is_batched or self.batch_axis is None
        self._share = (0, 1) if reads_all else (process_index, process_count)
        self._collate = collate_fn or default_collate
        self._total = source.length
        # Examples in the first batch; a batch that is passed on as it is counts as one
        self._size = 1 if self.batch_axis is None and not batch_size else batch_size
        self._apply()
        self._limit = num_batch_per_epoch
        is_known = batch_size or self.batch_axis is None
        # None: not yet known
        self._last_smaller = False if is_known else _last_is_smaller(iterable, self._total)
        if self._last_smaller and train:
            self._drop_last()
        if self.length is not None and self.length < 1:
            raise ValueError("the data must have at least one whole batch; reduce the batch size")
        # Two positions: `state_dict` is asked for between two batches, when the next pass may
        # already be set.
        self._next: State = _start_of(0)  # where the next iteration starts
        self._current = self._next  # after the last batch that was yielded
        self._end_state: Any = None  # of the source, if its last pass has ended
        # pass, its iterator, and its first batch
        self._opened: tuple[int, Pass, tuple[Any, int]] | None = None

    @property
    def batch_size(self) -> int | None:
        """The examples per batch.

        None if the loader does not have the number and no batch has been read.
        """
        if self.batch_axis is None and self.is_batched:
            return None
        size = getattr(self.iterable, "batch_size", None)
        return size if isinstance(size, int) and self.is_batched else self._size

    @property
    def length(self) -> int | None:
        """The number of batches in a pass; None if unknown or endless."""
        if self._total is None or self._limit is None:
            return self._limit if self._total is None else self._total
        return min(self._total, self._limit)

    @property
    def dataset_size(self) -> int | None:
        """The number of elements in a pass; None if unknown."""
        if not self.is_batched:
            return self.source.length
        return operator.length_hint(self.dataset, -1) if hasattr(self.iterable, "dataset") else None

    def __len__(self) -> int:
        if self.length is None:
            raise TypeError(f"{self.source.kind} has no length")
        return self.length

    @property
    def epoch(self) -> int:
        """The pass that the next iteration yields."""
        return self._next["epoch"]

    def set_epoch(self, epoch: int, start: int = 0) -> None:
        """Start the next iteration at batch `start` in pass `epoch`.

        The batches before are read and dropped.
        """
        if start < 0 or (self.length is not None and start > self.length):
            raise ValueError(
                f"start must be a position in the epoch, 0 to {self.length}, got {start}"
            )
        # Before the iterator is made: samplers read the epoch when they are iterated, not later.
        set_epoch(self.source.data, epoch)
        self._next = self._current = {
            **_start_of(epoch),
            "position": start,
            "examples": start * (self._size or 0),
        }

    def state_dict(self) -> State:
        """Return the position after the last batch that was yielded.

        Returns:
          `epoch`, the pass; `position` and `examples`, the batches and this process's examples that
          were yielded in it; for data with a state also `batch_size`, `state`, and `skip`, the
          elements that were read after it.
        """
        return self._current

    def load_state_dict(self, state: State) -> None:
        """Continue at the position from `state_dict`, at the same example if the batch size has
        changed.

        If the data yield batches, and the example is not the first in one, continue with the batch
        that it is in.
        """
        state = dict(state)
        size = self.batch_size
        set_epoch(self.source.data, state["epoch"])
        if self.is_batched and size and state.get("batch_size", size) != size:
            # Batches of another size have other limits: the one with the example is found by
            # reading from the start of the pass.
            start = {} if self.source.snapshot_interval is not None else {"state": state["state"]}
            state = {**_start_of(state["epoch"]), "examples": state["examples"], **start}
        if size and state["examples"] != state["position"] * size:
            # The examples decide, as they are what the run has seen; positions count batches of the
            # size at that time.
            state["position"] = state["examples"] // size
            if self.source.length is not None and self.length is not None and not self.is_batched:
                remaining = self._count_batches(
                    self.source.length - state["examples"] * self._share[1]
                )
                state["position"] = self.length - min(remaining, self.length)
            state["examples"] = state["position"] * size if self.is_batched else state["examples"]
        self._next = self._current = state

    def copy_at_epoch(self, epoch: int) -> "IterableLoader":
        """Return a loader for the same batches at the start of `epoch`.

        ValueError if the data allow only one pass.
        """
        source = self.source
        # With persistent workers a second iterator of PyTorch's loader takes over the processes of
        # the first.
        if source.is_single or getattr(self.iterable, "persistent_workers", False):
            raise ValueError(
                f"{self.kind} must allow a second pass during the current one, got one that "
                "allows only one pass at a time; "
                f"{source.advice or 'use data without a state of their own'}, and no "
                "persistent_workers"
            )
        other = copy.copy(self)  # which shares the user's object, unless its library can copy it
        other.source = source if source.copy is None else source.copy()
        other._opened = None
        other.set_epoch(epoch)
        return other

    def example(self) -> Batch:
        """Return the first batch of the next pass, which yields it again.

        ValueError if there is none.
        """
        if self._opened is None:
            # Kept open for the pass that follows: opening starts workers, and some sources can be
            # read only once.
            reading = self.source.open(self.epoch, 0, None)
            try:
                self._opened = (self.epoch, reading, self._read(reading.iterator))
            except StopIteration:
                raise ValueError(
                    f"{self.source.kind} must yield at least one batch, got none"
                ) from None
        return self._finish(*self._opened[2])

    def close(self) -> None:
        """End the data's threads and processes, if there are any."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def _count_batches(self, elements: int) -> int:
        return elements // self._elements if self.train else -(-elements // self._elements)

    def follow(self, batch_sizes: StepValues | None, example_lengths: StepValues | None) -> None:
        """Let the batch size and the length of rows follow the iteration, see `DataLoader.follow`.

        A row of a longer length is divided into rows of the current one: a batch keeps its tokens.
        """
        if self.is_batched or self.batch_axis is None:
            raise ConfigError(
                f"must yield examples for a `batch_size` or a length that changes, got {self.kind}"
            )
        super().follow(batch_sizes, example_lengths)

    def _apply(self) -> None:
        self._elements = (self._size or 1) * self._share[1]
        if self.source.length is not None and not self.is_batched:
            # Training drops a smaller last batch, which would compile a second program; an
            # evaluation pads it and counts all.
            self._total = self._count_batches(self.source.length)

    def __iter__(self) -> Iterator[Batch]:
        # Taken once: a loop that starts over without `set_epoch` begins at the start of the pass.
        start = self._next
        self._next = _start_of(self._next["epoch"])
        self._current = start
        if start["position"] and self._size is None:
            self.example()  # the size of the first batch is that of all
        return self._batches(start)

    def _batches(self, start: State) -> Iterator[Batch]:
        epoch = start["epoch"]
        position = start["position"]
        examples = start["examples"]
        skip = start.get("skip", examples * self._share[1] if not self.is_batched else position)
        reading, first = self._open(start, skip)
        state = start.get("state", reading.initial_state)
        interval = self.source.snapshot_interval
        try:
            while (length := self.length) is None or position < length:
                try:
                    batch, count = first or self._read(reading.iterator)
                except StopIteration:
                    break
                first = None
                size = self._size or count
                if count > size or (count < size and not self._is_last(reading, position)):
                    raise ValueError(
                        f"batches must have the same size, got {size} examples in batch 0 and "
                        f"{count} in batch {position}"
                    )
                # Only now is it known, for data without a length, that the batch was the last.
                if count < size and self.train:
                    if self._total is not None:
                        self._drop_last()
                    break
                position = position + 1
                examples = examples + count
                skip = skip + self._elements
                if interval is not None and position % interval == 0:
                    # a resumed run reads `skip` elements after it
                    state = self.source.get_state(reading)
                    skip = 0
                # Set before the yield: a checkpoint within the iteration counts this batch as seen.
                self._current = {"epoch": epoch, "position": position, "examples": examples}
                if interval is not None or reading.initial_state is not None:
                    self._current |= {"batch_size": size, "state": state, "skip": skip}
                # before the yield: a loop that takes no more has ended the pass
                if position == length:
                    self._end_pass(reading, epoch)
                yield self._finish(batch, count)
        # Also if the loop stops early or fails: threads and processes of a source would outlive the
        # run.
        finally:
            reading.close()
        # A wrong length would shift every schedule over epochs, so that it is no warning.
        if (
            self.length is not None
            and 0 < position < self.length
            and not self.source.may_be_shorter
        ):
            raise ConfigError(
                f"{self.source.kind} must yield as many batches as its length, {self.length}, got "
                f"{position} in pass {epoch + 1}; correct its length"
            )
        if self._current["epoch"] == epoch:
            self._end_pass(reading, epoch)

    def _end_pass(self, reading: Pass, epoch: int) -> None:
        self._current = _start_of(epoch + 1)
        self._end_state = self.source.get_end_state(reading)
        # A source that goes on where its last pass ended, such as a stream, must be resumed from
        # there.
        if self._end_state is not None:
            self._current |= {"batch_size": self._size, "state": self._end_state, "skip": 0}

    def _open(self, start: State, skip: int) -> tuple[Pass, tuple[Any, int] | None]:
        """Open a pass at `start`.

        Return it with its first batch if that has been read as an example.
        """
        opened = self._opened
        self._opened = None
        state = start.get("state")
        if opened is not None:
            is_same = opened[0] == start["epoch"] and start["position"] == start["examples"] == 0
            if (is_same and state is None) or self.resume == "lost":
                return opened[1], opened[2]
            opened[1].close()
        # By identity: an equal state from a checkpoint says nothing about where this source is now.
        is_next = state is not None and state is self._end_state  # where the source is
        self._end_state = None
        return self.source.open(start["epoch"], skip, None if is_next else state), None

    def _read(self, iterator: Iterator[Any]) -> tuple[Batch, int]:
        """Return a batch, padded by repeating the last example, and the number of real examples."""
        if self.is_batched:
            batch = to_numpy(next(iterator))
            count = 1 if self.batch_axis is None else count_examples(select_arrays(batch))
            self._size = self._size or count
            return batch, count
        # Each process reads the elements of all and keeps every P-th, so that all end their passes
        # together
        elements = list(itertools.islice(iterator, self._elements))
        if not elements:
            raise StopIteration
        index, processes = self._share
        own = elements[index::processes]
        count = len(own)
        if self.batch_axis == 0:
            # at the end of the data, where other processes have an example left
            own = own or elements[-1:]
            # Padding repeats a real example, whose numbers are valid in every model; the mask gives
            # it no weight.
            own += own[-1:] * (self._elements // processes - len(own))
        examples = [to_numpy(example) for example in own]
        with explained(samples=examples):
            batch = self._collate(examples)
        return (to_numpy(batch) if self.batch_axis is None else batch), count

    def _is_last(self, reading: Pass, position: int) -> bool:
        if self._total is not None:
            return position == self._total - 1
        return next(reading.iterator, _END) is _END

    def _finish(self, batch: Batch, count: int) -> Batch:
        """Return a batch with rows of the current length, and in an evaluation with a mask."""
        if self.example_length is not None:
            batch = divide_rows(batch, self.example_length)
        if self.train or self.batch_axis is None:
            return batch
        size = self._size or count
        if self._last_smaller is False and not isinstance(batch, Mapping) and count == size:
            return batch  # no batch needs padding, so none needs a mask
        is_padded = count == size or not self.is_batched
        return with_mask(batch if is_padded else pad_examples(batch, size), np.arange(size) < count)

    def _drop_last(self) -> None:
        warnings.warn(
            f"the last of {self._total} batches is smaller than the others and is dropped: "
            "training would have to "
            "compile for two sizes; set drop_last=True (drop_remainder=True) in the loader",
            stacklevel=3,
        )
        assert self._total is not None
        self._total = self._total - 1
        self._last_smaller = False


def _start_of(epoch: int) -> State:
    return {"epoch": epoch, "position": 0, "examples": 0}


def _last_is_smaller(iterable: object, total: int | None) -> bool | None:
    """Return whether the last batch is smaller.

    None if that is unknown without a pass over the data.
    """
    if total is None or total < 2:
        return None if total is None else False
    if isinstance(iterable, list | tuple):
        # Two items tell it for a list; for other iterables it would take a pass over the data.
        first, last = (
            count_examples(select_arrays(to_numpy(iterable[index]))) for index in (0, -1)
        )
        return last < first
    size: Any = getattr(iterable, "batch_size", None)
    sampler: Any = getattr(iterable, "sampler", None)
    if (
        not isinstance(size, int)
        or not hasattr(iterable, "drop_last")
        or not hasattr(sampler, "__len__")
    ):
        return None
    return not iterable.drop_last and len(sampler) % size != 0
