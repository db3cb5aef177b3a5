"""Foreign data in passes, which continue where a checkpoint was written.

A `DataSource` hides how a library stores a position: grain in its iterators, Hugging Face and
torchdata in the object itself, PyTorch in a generator, TensorFlow in its own checkpoint, most
others not at all.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from typing import Any, Literal, Optional, Protocol

from jengine.data.host_entries import Batch

Resume = Literal["exact", "replayed", "lost"]
SourceState = Any  # of `get_state` or `Pass.initial_state`: each library has its own kind


@dataclasses.dataclass
class Pass:
    """One pass over a source."""

    iterator: Any
    initial_state: SourceState = None  # before the first element; None if the source has no state
    offset: int = 0  # the element from which the iterator counts, for sources with random access

    def close(self) -> None:
        """End the iterator's threads and processes, if it has any."""
        close = getattr(self.iterator, "close", None)  # a foreign iterator need not have it
        if close is not None:
            close()


class Stateful(Protocol):
    """Data that know their position."""

    def __iter__(self) -> Iterator[Batch]: ...
    def state_dict(self) -> dict[str, Any]:
        """Return the position in the data."""

    def load_state_dict(self, state: Any) -> object:
        """Continue from a position that `state_dict` returned."""


def _no_state(reading: Pass) -> None:
    return None


@dataclasses.dataclass(frozen=True)
class DataSource:
    """Data that can be iterated in passes, as functions.

    Attributes:
      data: the user's object.
      kind: the object's name in messages.
      open: `(epoch, start, state)` -> pass number `epoch` (which `set_epoch` of the data has
        received) from element `start` on; with a `state`, from `get_state` or `Pass.initial_state`,
        `start` counts from there.
      length: number of elements in a pass; None if unknown or endless.
      resume: 'exact' if a resumed run continues with the same elements; 'replayed' if elements are
        read and dropped, so that this depends on whether the data repeat their order; 'lost' if it
        continues with what the data yield next.
      advice: what makes the position exact, or passes differ; empty if there is nothing to say.
      snapshot_interval: elements between two calls to `get_state`; None for a pass's initial state
        only.
      may_be_shorter: whether a pass may yield fewer elements than `length`.
      is_single: whether the data allow only one pass at a time.
      get_state: pass -> state after the elements taken so far; None if there is none.
      get_end_state: pass -> state for the next one, after the last element; None if the epoch
        determines it.
      shard: `(index, count)` -> source for every `count`-th element from `index` on; None if the
        library cannot.
      copy: returns a source for passes during those in this one, if this one cannot be used for
        them.
    """

    data: Any
    kind: str
    open: Callable[[int, int, SourceState], Pass]
    length: int | None = None
    resume: Resume = "replayed"
    advice: str = ""
    snapshot_interval: int | None = None
    may_be_shorter: bool = False
    is_single: bool = False
    get_state: Callable[[Pass], SourceState] = _no_state
    get_end_state: Callable[[Pass], SourceState] = _no_state
    shard: Callable[[int, int], Optional["DataSource"]] = lambda index, count: None
    copy: Callable[[], "DataSource"] | None = None


def sequence_source(data: Sequence[Batch]) -> DataSource:
    """Return the source for a list or tuple with batches, which can start anywhere."""
    open_pass = lambda epoch, start, state: Pass(itertools.islice(data, start, None))  # noqa: E731
    return DataSource(data, type(data).__name__, open_pass, len(data), "exact")


def iterable_source(data: Iterable[Batch]) -> DataSource:
    """Return the source for data that can be iterated repeatedly, without a position: elements
    are dropped.
    """
    open_pass = lambda epoch, start, state: Pass(skip(iter(data), start))  # noqa: E731
    return DataSource(data, type(data).__name__, open_pass, find_length(data))


def function_source(data: Callable[[], Iterable[Batch]]) -> DataSource:
    """Return the source for a function, such as a generator function, that returns the iterator
    for each pass.
    """
    kind = f"function {getattr(data, '__name__', type(data).__name__)}"
    return DataSource(data, kind, lambda epoch, start, state: Pass(skip(iter(data()), start)))


def iterator_source(data: Any) -> DataSource:
    """Return the source for an iterator, which allows one pass. Grain's iterators have a state."""
    has_state = hasattr(data, "get_state") and hasattr(data, "set_state")

    def open_pass(epoch: int, start: int, state: SourceState) -> Pass:
        if state is not None:
            data.set_state(state)
            skip(data, start)  # without a state, what an earlier run read is not dropped
        return Pass(itertools.chain(data))  # which cannot be closed with the pass

    source = DataSource(
        data,
        type(data).__name__,
        open_pass,
        resume="lost",
        advice="pass the object that the iterator was made of, or a function that returns a new "
        "iterator",
        is_single=True,
    )
    if not has_state:
        return source
    return dataclasses.replace(
        source, resume="exact", snapshot_interval=1, get_state=lambda reading: data.get_state()
    )


def state_dict_source(data: Stateful) -> DataSource:
    """Return the source for an object with `state_dict` and `load_state_dict`, and `set_epoch`
    if passes differ.
    """

    def open_pass(epoch: int, start: int, state: SourceState) -> Pass:
        if state is not None:
            data.load_state_dict(state)
        return Pass(skip(iter(data), start))

    return DataSource(
        data,
        type(data).__name__,
        open_pass,
        find_length(data),
        "exact",
        snapshot_interval=1,
        is_single=True,  # the state is that of the last pass that was started
        # the object changes it with the next batch
        get_state=lambda reading: copy.deepcopy(data.state_dict()),
    )


def skip(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Drop `count` elements and return the iterator."""
    next(itertools.islice(iterator, count, count), None)
    return iterator


def find_length(data: Iterable[Batch]) -> int | None:
    """Return the length; None if the data have none."""
    try:
        return len(data) if isinstance(data, Sized) else None
    except TypeError:  # it has the method, and no length
        return None
