"""Adapt data of other libraries to the interface of `DataLoader`: batches, or examples to batch."""

import copy
import datetime
import itertools
import operator
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jengine.data.collate import count_examples, default_collate, is_flat, is_numbers, pad_examples
from jengine.data.find_source import as_source, set_epoch
from jengine.data.host_entries import select_arrays
from jengine.data.masking import with_mask
from jengine.data.sources import Pass
from jengine.errors import ConfigError

State = dict[str, Any]
_TEXT = (str, bytes, datetime.date, datetime.timedelta, np.datetime64, np.timedelta64)


class IterableLoader:
    """Yield batches of one size from data that are iterated: streams, loaders and datasets of other libraries.

    Arrays of other libraries become NumPy arrays, lists of strings NumPy arrays of strings. The data may be a grain
    `DataLoader`, `MapDataset` or `IterDataset`, a PyTorch `DataLoader`, a `tf.data.Dataset` or `tfds.as_numpy` of it, a
    stream of Hugging Face `datasets`, a list of batches, a generator function, or any other iterable.

    Args:
      iterable: yields batches; examples if `batch_size` is given.
      train: whether a smaller last batch is dropped. When False it is padded, and every batch gets `mask`: bool[B],
        True for a real example.
      batch_size: number of examples to stack to a batch; None if `iterable` yields batches.
      collate_fn: list of examples -> batch; None stacks them.
      num_batch_per_epoch: maximum number of batches in a pass.
      device_prefetch: batches that a loop sends to the device ahead of the current one; None for the attribute of that
        name of the iterable, or 2.
      process_index: this process; of P processes, p reads the p-th, (p + P)-th ... example. Batches are not divided:
        an iterable of batches yields those of its process.
      process_count: number of processes that share the examples.

    Attributes:
      length: batches in a pass; None if unknown or endless.
      source: how the data are read, and whether their position can be saved.
      is_batched: whether `iterable` yields batches.
      process_index, process_count: the share of the examples that this process reads.

    Raises:
      ConfigError: data that cannot be iterated. ValueError: no batches.
    """

    has_random_access = False  # each process reads its own share

    def __init__(
        self,
        iterable: Any,
        train: bool,
        batch_size: int | None = None,
        collate_fn: Callable[[Sequence[Any]], Any] | None = None,
        num_batch_per_epoch: int | None = None,
        device_prefetch: int | None = None,
        process_index: int = 0,
        process_count: int = 1,
    ) -> None:
        if collate_fn is not None and not batch_size:
            raise ConfigError("`collate_fn` must be given with `batch_size`: an iterable without it yields batches")
        self.iterable = iterable
        self.source = source = as_source(iterable)
        self.train = train
        self.dataset = getattr(iterable, "dataset", iterable)
        self.sampler = getattr(iterable, "sampler", None)
        self.device_prefetch: int = getattr(iterable, "device_prefetch", 2)
        if device_prefetch is not None:
            self.device_prefetch = device_prefetch
        if type(self.device_prefetch) is not int or self.device_prefetch < 0:
            raise ConfigError(
                f"`device_prefetch` must be an integer of at least 0, got {self.device_prefetch!r} of {source.kind}"
            )
        self.is_batched = not batch_size
        self.process_index, self.process_count = process_index, process_count
        sharded = source.shard(process_index, process_count) if train and process_count > 1 and batch_size else None
        if sharded is not None:
            self.source = source = sharded
        self.kind, self.advice, self.resume = source.kind, source.advice, source.resume
        shard = (0, 1) if sharded is not None or not batch_size else (process_index, process_count)
        self._reader = _Reader(batch_size, collate_fn or default_collate, *shard)
        self._total = self._reader.count_batches(source.length, drop_last=train)
        self._limit = num_batch_per_epoch
        self._last_smaller = False if batch_size else _last_is_smaller(iterable, self._total)  # None: not yet known
        if self._last_smaller and train:
            self._drop_last()
        if self.length is not None and self.length < 1:
            raise ValueError("the data must have at least one whole batch; reduce the batch size")
        self._size: int | None = batch_size  # of the first batch
        self._next: State = _start_of(0)  # where the next iteration starts
        self._current = self._next  # after the last batch that was yielded
        self._end_state: Any = None  # of the source, if its last pass has ended
        self._opened: tuple[int, Pass, tuple[Any, int | None]] | None = None  # pass, its iterator, and its first batch

    @property
    def metainfo(self) -> Any:
        """The metainfo of the dataset (class names and so on); None if it has none."""
        return getattr(self.dataset, "metainfo", None)

    @property
    def batch_size(self) -> int | None:
        """The examples per batch; None if the loader does not have the number and no batch has been read."""
        size = getattr(self.iterable, "batch_size", None)
        return size if isinstance(size, int) and self._reader.batch_size is None else self._size

    @property
    def length(self) -> int | None:
        """The number of batches in a pass; None if unknown or endless."""
        if self._total is None or self._limit is None:
            return self._total if self._limit is None else self._limit
        return min(self._total, self._limit)

    @property
    def dataset_size(self) -> int | None:
        """The number of elements of the dataset in a pass; None if unknown."""
        if self._reader.batch_size is not None:
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
        """Start the next iteration at batch `start` of pass `epoch`; the batches before are read and dropped.

        Raises:
          ValueError: `start` is outside the pass.
        """
        if start < 0 or (self.length is not None and start > self.length):
            raise ValueError(f"start must be a position in the epoch, 0 to {self.length}, got {start}")
        set_epoch(self.source.data, epoch)
        self._next = self._current = {**_start_of(epoch), "position": start, "examples": start * (self._size or 0)}

    def state_dict(self) -> State:
        """Return the position after the last batch that was yielded.

        Returns:
          `epoch`: the pass. `position` and `examples`: the batches and the examples of this process that were yielded
          in it. For data with a state also `batch_size`; `state`; and `skip`, the elements that were read after it.
        """
        return self._current

    def load_state_dict(self, state: State) -> None:
        """Continue at the position that `state_dict` returned, at the same example if the batch size has changed.

        If the data yield batches, and the example is not the first of one, continue with the batch that it is in.
        """
        state, size = dict(state), self.batch_size
        set_epoch(self.source.data, state["epoch"])
        if self._reader.batch_size is None and size and state.get("batch_size", size) != size:
            initial = {"state": state["state"]} if self.source.snapshot_interval is None else {}  # that of the pass
            state = {**_start_of(state["epoch"]), "position": -1, "examples": state["examples"], **initial}
        if size and state["examples"] != state["position"] * size:
            state["position"] = state["examples"] // size
            state["examples"] = state["position"] * size if self._reader.batch_size is None else state["examples"]
        self._next = self._current = state

    def copy_at_epoch(self, epoch: int) -> "IterableLoader":
        """Return a loader of the same batches at the start of `epoch`; requires a source with independent passes.

        Raises:
          ValueError: the data allow only one pass at a time.
        """
        other = copy.copy(self)
        other.source = self.source.copy()
        other._opened = None
        other.set_epoch(epoch)
        return other

    def example(self) -> Any:
        """Return the first batch of the next pass, which yields it again.

        Raises:
          ValueError: there is no batch.
        """
        if self._opened is None:
            reading = self.source.open(self.epoch)
            try:
                first = self._reader.read(reading.iterator)
            except StopIteration:
                raise ValueError(f"{self.source.kind} must yield at least one batch, got none") from None
            self._opened = (self.epoch, reading, first)
        batch, num_real = self._opened[2]
        count, size = self._measure(batch, num_real)
        return batch if self.train else self._add_mask(batch, count, size)

    def close(self) -> None:
        """End the threads and processes of the data, if there are any."""
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None

    def __iter__(self) -> Iterator[Any]:
        start, self._next = self._next, _start_of(self._next["epoch"])
        self._current = start
        if start["position"] and self._size is None:
            self.example()  # the size of the first batch is that of all
        return self._batches(start)

    def _batches(self, start: State) -> Iterator[Any]:
        epoch, position, examples = start["epoch"], start["position"], start["examples"]
        reading, first = self._open(start)
        state, skip = start.get("state", reading.initial_state), start.get("skip", self._count_elements(start))
        interval = self.source.snapshot_interval
        try:
            while self.length is None or position < self.length:
                try:
                    batch, num_real = first or self._reader.read(reading.iterator)
                except StopIteration:
                    break
                first, full = None, is_flat(batch) and num_real is None and self.train
                count, size = self._measure(batch, num_real)
                if not full or count != size:
                    self._check_size(reading, position, count, size)
                if count < size and self.train:
                    if self._total is not None:
                        self._drop_last()
                    break
                position, examples, skip = position + 1, examples + count, skip + self._reader.elements
                if interval is not None and position % interval == 0:
                    state, skip = self.source.get_state(reading), 0
                self._current = {"epoch": epoch, "position": position, "examples": examples}
                if interval is not None or reading.initial_state is not None:
                    self._current |= {"batch_size": size, "state": state, "skip": skip}
                if position == self.length:
                    self._end_pass(reading, epoch)
                yield batch if self.train else self._add_mask(batch, count, size)
        finally:
            reading.close()
        if self.length is not None and 0 < position < self.length and not self.source.may_be_shorter:
            raise ConfigError(
                f"{self.source.kind} must yield as many batches as its length, {self.length}, got {position} in pass "
                f"{epoch + 1}; correct its length"
            )
        if position != self.length:
            self._end_pass(reading, epoch)

    def _end_pass(self, reading: Pass, epoch: int) -> None:
        self._current, self._end_state = _start_of(epoch + 1), self.source.get_end_state(reading)
        if self._end_state is not None:
            self._current |= {"batch_size": self._size, "state": self._end_state, "skip": 0}

    def _open(self, start: State) -> tuple[Pass, tuple[Any, int | None] | None]:
        """Open a pass at `start`; return it with its first batch if that has been read as an example."""
        opened, self._opened = self._opened, None
        if opened is not None:
            is_same = opened[0] == start["epoch"] and start["position"] == start["examples"] == 0
            if (is_same and start.get("state") is None) or self.resume == "lost":
                return opened[1], opened[2]
            opened[1].close()
        skip, state = start.get("skip", self._count_elements(start)), start.get("state")
        is_next = state is not None and state is self._end_state  # where the source is
        self._end_state = None
        return self.source.open(start["epoch"], skip, None if is_next else state), None

    def _count_elements(self, start: State) -> int:
        """Return the elements of the pass that come before `start`."""
        is_stream = self._reader.batch_size is not None
        return start["examples"] * self._reader.process_count if is_stream else start["position"]

    def _measure(self, batch: Any, num_real: int | None) -> tuple[int, int]:
        """Return the number of real examples of a batch, and that of a whole batch."""
        count = count_examples(select_arrays(batch)) if num_real is None else num_real
        self._size = self._size or count
        return count, self._size

    def _check_size(self, reading: Pass, position: int, count: int, size: int) -> None:
        """Raise ValueError if a batch has another size than the first, unless it is the last and smaller."""
        is_last = count < size and (
            position == self._total - 1 if self._total is not None else next(reading.iterator, _END) is _END
        )
        if count != size and not is_last:
            raise ValueError(
                f"batches must have the same size, got {size} examples in batch 0 and {count} in batch {position}"
            )

    def _add_mask(self, batch: Any, count: int, size: int) -> Any:
        if self._last_smaller is False and not isinstance(batch, Mapping) and count == size:
            return batch  # no batch needs padding, so none needs a mask
        is_padded = count == size or self._reader.batch_size is not None
        return with_mask(batch if is_padded else pad_examples(batch, size), np.arange(size) < count)

    def _drop_last(self) -> None:
        warnings.warn(
            f"the last of {self._total} batches is smaller than the others and is dropped: training would have to "
            "compile for two sizes; set drop_last=True (drop_remainder=True) in the loader",
            stacklevel=3,
        )
        assert self._total is not None
        self._total -= 1
        self._last_smaller = False


class _Reader:
    """Read a batch from an iterator, or stack the examples of this process to one.

    Args:
      batch_size: the examples in a batch; None if the iterator yields batches.
      collate: list of examples -> batch.
      process_index, process_count: of each `process_count` examples this process takes one.

    Attributes:
      elements: the elements of the iterator in a whole batch.
    """

    def __init__(
        self, batch_size: int | None, collate: Callable[[Sequence[Any]], Any], process_index: int, process_count: int
    ) -> None:
        self.batch_size = batch_size
        self.process_count = process_count
        self.elements = (batch_size or 1) * process_count
        self._collate = collate
        self._process_index = process_index

    def count_batches(self, elements: int | None, drop_last: bool) -> int | None:
        """Return the number of batches from `elements` elements."""
        if elements is None or self.batch_size is None:
            return elements
        return elements // self.elements if drop_last else -(-elements // self.elements)

    def read(self, iterator: Iterator[Any]) -> tuple[Any, int | None]:
        """Return a batch, padded by repeating its last example, and its number of real examples; None if unknown.

        Raises:
          StopIteration: there are no more elements.
        """
        if self.batch_size is None:
            return to_numpy(next(iterator)), None
        elements = list(itertools.islice(iterator, self.elements))
        if not elements:
            raise StopIteration
        own = elements[self._process_index :: self.process_count]
        num_real = len(own)
        own = own or elements[-1:]  # at the end of the data, where other processes have an example left
        own += own[-1:] * (self.batch_size - len(own))
        return self._collate([to_numpy(example) for example in own]), num_real


def to_numpy(batch: Any) -> Any:
    """Return a batch or example of another library with NumPy arrays, also for lists of numbers, strings or dates.

    Raises:
      ValueError: a list of lists of different lengths; the message names the entry.
    """
    if is_flat(batch):
        return batch
    is_leaf = lambda node: _is_text(node) or (node is not batch and is_numbers(node))  # noqa: E731
    try:
        return jax.tree.map(_to_array, batch, is_leaf=is_leaf)
    except ValueError as error:
        for path, leaf in jax.tree_util.tree_leaves_with_path(batch, is_leaf=is_leaf):
            if type(leaf) is list and len({np.shape(np.asarray(item, object)) for item in leaf}) > 1:
                name = jax.tree_util.keystr(path, simple=True, separator=".")
                raise ValueError(
                    f"lists of numbers must have equal lengths to become an array, got others in the entry {name!r}; "
                    "pad them, or leave the entry out"
                ) from error
        raise


def _to_array(leaf: Any) -> Any:
    if isinstance(leaf, np.ndarray | np.generic | jax.Array | str | bytes):
        return leaf
    if hasattr(leaf, "detach"):  # a torch tensor, recognized without importing torch
        leaf = leaf.detach().cpu()
    return np.asarray(leaf)


def _is_text(node: Any) -> bool:
    """Return whether a node is a list of strings or dates, such as file names."""
    return type(node) in (list, tuple) and bool(node) and all(isinstance(item, _TEXT) for item in node)


def _start_of(epoch: int) -> State:
    return {"epoch": epoch, "position": 0, "examples": 0}


def _last_is_smaller(iterable: Any, total: int | None) -> bool | None:
    """Return whether the last batch is smaller; None if that is unknown without a pass over the data."""
    if total is None:
        return None
    if total < 2:
        return False
    if isinstance(iterable, list | tuple):
        first, last = (count_examples(select_arrays(to_numpy(iterable[index]))) for index in (0, -1))
        return last < first
    size: Any = getattr(iterable, "batch_size", None)
    sampler: Any = getattr(iterable, "sampler", None)
    if not isinstance(size, int) or not hasattr(iterable, "drop_last") or not hasattr(sampler, "__len__"):
        return None
    return not iterable.drop_last and len(sampler) % size != 0


_END = object()
