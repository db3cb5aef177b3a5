"""Foreign data in passes, which continue where a checkpoint was written.

A `Source` hides how a library stores a position: grain in its iterators, Hugging Face and torchdata in the object
itself, PyTorch in a generator, TensorFlow in its own checkpoint, most others not at all.
"""

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterator
from typing import Any, Literal

Resume = Literal["exact", "replayed", "lost"]


@dataclasses.dataclass
class Pass:
    """One pass over a source."""

    iterator: Iterator[Any]
    initial_state: Any = None  # before the first element; None if the source has no state
    offset: int = 0  # the element from which the iterator counts, for sources with random access

    def close(self) -> None:
        """End the iterator's threads and processes, if it has any."""
        close = getattr(self.iterator, "close", None)  # a foreign iterator need not have it
        if close is not None:
            close()


class Source:
    """Data that can be iterated repeatedly, without a position: elements are read and dropped.

    Args:
      data: the user's object.

    Attributes:
      kind: the object's name in messages.
      length: number of elements in a pass; None if unknown or endless.
      resume: 'exact' if a resumed run continues with the same elements; 'replayed' if elements are read and dropped, so
        that this depends on whether the data repeat their order; 'lost' if it continues with what the data yield next.
      advice: what makes the position exact, or passes differ; empty if there is nothing to say.
      snapshot_interval: elements between two calls to `get_state`; None for a pass's initial state only.
      may_be_shorter: whether a pass may yield fewer elements than `length`.
      is_single: whether the data allow only one pass at a time.
    """

    resume: Resume = "replayed"
    advice = ""
    snapshot_interval: int | None = None
    may_be_shorter = False
    is_single = False

    def __init__(self, data: Any) -> None:
        self.data = data
        self.kind = type(data).__name__
        self.length = _length(data)

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start pass number `epoch`.

        Args:
          epoch: the pass; the data's `set_epoch` has received it.
          start: number of elements to read and drop.
          state: from `get_state` or `Pass.initial_state`; `start` then counts from there.
        """
        return Pass(skip(iter(self.data), start))

    def get_state(self, reading: Pass) -> Any:
        """Return the state after the elements taken so far; None if there is none."""
        return None

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state for the next pass, after the last element; None if the epoch determines it."""
        return None

    def shard(self, index: int, count: int) -> "Source | None":
        """Return the source for every `count`-th element from `index` on; None if the library cannot divide it."""
        return None

    def copy(self) -> "Source":
        """Return a source for passes during those in this one; ValueError if the data allow only one at a time."""
        keeps_workers = getattr(self.data, "persistent_workers", False)  # a PyTorch loader's, which are of one pass
        if self.is_single or keeps_workers:
            advice = self.advice or "use data without a state of their own"
            raise ValueError(
                f"{self.kind} must allow a second pass during the current one, got one that allows only one pass at a "
                f"time; {'remove persistent_workers=True' if keeps_workers else advice}"
            )
        return copy.copy(self)


class SequenceSource(Source):
    """List or tuple with batches, from any position."""

    resume: Resume = "exact"

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass at element `start`."""
        return Pass(itertools.islice(self.data, start, None))


class FunctionSource(Source):
    """Function, such as a generator function, that returns the iterator for each pass."""

    def __init__(self, data: Callable[[], Any]) -> None:
        self.data = data
        self.kind = f"function {getattr(data, '__name__', type(data).__name__)}"
        self.length = None

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Call the function, and drop `start` elements."""
        return Pass(skip(iter(self.data()), start))


class IteratorSource(Source):
    """Iterator, which allows one pass. Grain's iterators have a state."""

    advice = "pass the object that the iterator was made of, or a function that returns a new iterator"
    is_single = True

    def __init__(self, data: Iterator[Any]) -> None:
        super().__init__(data)
        self.length = None
        self.resume = "exact" if hasattr(data, "get_state") and hasattr(data, "set_state") else "lost"
        self.snapshot_interval = 1 if self.resume == "exact" else None

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Return the iterator, at `state` if it has one; elements that an earlier run read are not dropped."""
        if state is not None:
            self.data.set_state(state)
            skip(self.data, start)
        return Pass(itertools.chain(self.data))  # which cannot be closed with the pass

    def get_state(self, reading: Pass) -> Any:
        """Return the iterator's state."""
        return self.data.get_state() if self.resume == "exact" else None


class StateDictSource(Source):
    """Object with `state_dict` and `load_state_dict`, and with `set_epoch` if passes differ."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 1
    is_single = True  # the state is that of the last pass that was started

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass, at `state` if it is given."""
        if state is not None:
            self.data.load_state_dict(state)
        return Pass(skip(iter(self.data), start))

    def get_state(self, reading: Pass) -> Any:
        """Return a copy of the object's state."""
        return copy.deepcopy(self.data.state_dict())


def skip(iterator: Iterator[Any], count: int) -> Iterator[Any]:
    """Drop `count` elements and return the iterator."""
    next(itertools.islice(iterator, count, count), None)
    return iterator


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None
