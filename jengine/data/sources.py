"""Read the data of other libraries in passes, and continue a pass where a checkpoint was written.

A `Source` hides how a library stores a position: grain in its iterators, Hugging Face and torchdata in the object
itself, PyTorch in a generator, TensorFlow in a checkpoint of its own, most others not at all.
"""

import copy
import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal, NoReturn

from jengine.errors import ConfigError

_LOGGER = logging.getLogger("jengine")

Resume = Literal["exact", "replayed", "lost"]


class Pass:
    """Hold the iterator of one pass over a source.

    Args:
      iterator: yields the elements.
      initial_state: the state before the first of them; None if the source has no state.
    """

    def __init__(self, iterator: Iterator[Any], initial_state: Any = None) -> None:
        self.iterator = iterator
        self.initial_state = initial_state

    def close(self) -> None:
        """End the threads and processes of the iterator, if it has any."""
        close = getattr(self.iterator, "close", None)  # a foreign iterator need not have it
        if close is not None:
            close()


class Source:
    """Read data that can be iterated repeatedly, without a position of their own: elements are read and dropped.

    Args:
      data: the object of the user.

    Attributes:
      kind: name of the object in messages.
      length: number of elements in a pass; None if unknown or endless.
      resume: 'exact' if a resumed run continues with the same elements; 'replayed' if elements are read and dropped, so
        that this depends on whether the data repeat their order; 'lost' if it continues with what the data yield next.
      advice: what makes the position exact, or passes differ; empty if there is nothing to say.
      snapshot_interval: elements between two calls of `get_state`; None for the initial state of a pass only.
      may_be_shorter: whether a pass may yield fewer elements than `length`.
    """

    resume: Resume = "replayed"
    advice = ""
    snapshot_interval: int | None = None
    may_be_shorter = False

    def __init__(self, data: Any) -> None:
        self.data = data
        self.kind = type(data).__name__
        self.length = _length(data)

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start pass number `epoch`.

        Args:
          epoch: the number of the pass; it has been passed to `set_epoch` of the data.
          start: number of elements to read and drop.
          state: of the source, from `get_state` or `Pass.initial_state`; `start` then counts from there.
        """
        return Pass(self._skip(iter(self.data), start))

    def get_state(self, reading: Pass) -> Any:
        """Return the state after the elements taken so far; None if there is none."""
        return None

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state at the start of the next pass; None if the epoch alone determines it, or it is unknown.

        Args:
          reading: a pass whose last element has been taken.
        """
        return None

    def shard(self, index: int, count: int) -> "Source | None":
        """Return the source of every `count`-th element from `index` on; None if the library cannot divide it."""
        return None

    def copy(self) -> "Source":
        """Return a source for passes of its own, during those of this one.

        Raises:
          ValueError: the data allow only one pass at a time.
        """
        return copy.copy(self)

    def _refuse_copy(self) -> NoReturn:
        raise ValueError(
            f"{self.kind} must allow a second pass during the current one, got one that allows only one pass at a "
            f"time; {self.advice or 'use data without a state of their own'}"
        )

    def _skip(self, iterator: Iterator[Any], count: int) -> Iterator[Any]:
        for _ in itertools.islice(iterator, count):
            pass
        return iterator


class SequenceSource(Source):
    """Read a list or tuple of batches, from any position."""

    resume: Resume = "exact"

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass at element `start`."""
        return Pass(itertools.islice(self.data, start, None))


class FunctionSource(Source):
    """Call a function, such as a generator function, for the iterator of each pass."""

    def __init__(self, data: Callable[[], Any]) -> None:
        self.data = data
        self.kind = f"function {getattr(data, '__name__', type(data).__name__)}"
        self.length = None

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Call the function, and drop `start` elements."""
        return Pass(self._skip(iter(self.data()), start))


class IteratorSource(Source):
    """Read an iterator, which allows one pass. Grain's iterators have a state."""

    advice = "pass the object that the iterator was made of, or a function that returns a new iterator"

    def __init__(self, data: Iterator[Any]) -> None:
        super().__init__(data)
        self.length = None
        self.resume = "exact" if _has_iterator_state(data) else "lost"
        self.snapshot_interval = 1 if self.resume == "exact" else None

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Return the iterator, at `state` if it has one; elements that an earlier run read are not dropped."""
        if state is not None:
            self.data.set_state(state)
            self._skip(self.data, start)
        return Pass(itertools.chain(self.data))  # which cannot be closed with the pass

    def get_state(self, reading: Pass) -> Any:
        """Return the state of the iterator."""
        return self.data.get_state() if self.resume == "exact" else None

    def copy(self) -> NoReturn:
        """Raise ValueError: there is one iterator."""
        self._refuse_copy()


class GrainSource(Source):
    """Read a grain `IterDataset` or `DataLoader`, whose iterators have a state."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 1

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        is_loader = type(data).__name__ == "DataLoader"
        self.kind = "grain.DataLoader" if is_loader else "grain.IterDataset"
        self._repeat = "num_epochs=None in the sampler" if is_loader else ".repeat() before .to_iter_dataset()"
        self._has_warned = False

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass, at `state` if it is given."""
        if epoch > 0 and not self._has_warned:
            self._has_warned = True
            _LOGGER.warning(
                f"{self.kind}: each pass has the order of the first. For another order in each, use {self._repeat}, "
                "and train_cfg.epoch_length in a loop over epochs."
            )
        _parse_flags()
        iterator = iter(self.data)
        if state is not None:
            iterator.set_state(state)
        return Pass(self._skip(iterator, start))

    def get_state(self, reading: Pass) -> Any:
        """Return the state of the iterator."""
        return reading.iterator.get_state()  # type: ignore[attr-defined]


class GrainMapSource(Source):
    """Read a grain `MapDataset`: pass e is its e-th repetition, which it shuffles with another seed."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 1
    may_be_shorter = True  # filtered elements are left out

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.kind = "grain.MapDataset"
        self.length = None if len(data) >= sys.maxsize else len(data)

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start at element `start` of repetition `epoch`, without reading those before."""
        data = self.data
        if self.length is not None:
            first = epoch * self.length + (0 if state is not None else start)
            data = data.repeat()[first : (epoch + 1) * self.length]
        elif state is None:
            data = data[start:]
        iterator = iter(data.to_iter_dataset())
        if state is None:
            return _GrainMapPass(iterator, offset=start)
        iterator.set_state({**state, "next_index": state["next_index"]})
        return _GrainMapPass(self._skip(iterator, start), offset=0)

    def get_state(self, reading: Pass) -> Any:
        """Return the index of the next element in the repetition."""
        assert isinstance(reading, _GrainMapPass)
        state = reading.iterator.get_state()  # type: ignore[attr-defined]
        return {**state, "next_index": state["next_index"] + reading.offset}

    def shard(self, index: int, count: int) -> "GrainMapSource":
        """Return the source of every `count`-th element from `index` on."""
        return GrainMapSource(self.data[index::count])


class _GrainMapPass(Pass):
    """Hold a pass over a part of a `MapDataset`, whose iterator counts from `offset`."""

    def __init__(self, iterator: Iterator[Any], offset: int) -> None:
        super().__init__(iterator)
        self.offset = offset


class StateDictSource(Source):
    """Read an object with `state_dict` and `load_state_dict`, and with `set_epoch` if its passes differ."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 1

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass, at `state` if it is given."""
        if state is not None:
            self.data.load_state_dict(state)
        return Pass(self._skip(iter(self.data), start))

    def get_state(self, reading: Pass) -> Any:
        """Return a copy of the state of the object."""
        return copy.deepcopy(self.data.state_dict())

    def copy(self) -> NoReturn:
        """Raise ValueError: the state is that of the last pass that was started."""
        self._refuse_copy()


class TorchDataSource(StateDictSource):
    """Read torchdata's `StatefulDataLoader`, whose state at the end of a pass determines the order of the next one."""

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state after the end; None if the pass is cut short by a limit."""
        return self.get_state(reading) if next(reading.iterator, _END) is _END else None


class HuggingFaceSource(StateDictSource):
    """Read a stream of Hugging Face `datasets`, whose order is a function of its seed and its epoch.

    Its state lacks the content of shuffle buffers: with one, the elements before the position are read and dropped.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.kind = "datasets.IterableDataset"
        if _has_shuffle_buffer(data):
            self.resume, self.snapshot_interval = "replayed", None
            self.advice = "shuffle the shards alone, .shuffle(seed=..., buffer_size=1), or use a map-style dataset"

    def shard(self, index: int, count: int) -> "HuggingFaceSource":
        """Return the source of every `count`-th shard, or of every `count`-th example if the shards do not divide."""
        from datasets.distributed import split_dataset_by_node

        return HuggingFaceSource(split_dataset_by_node(self.data, rank=index, world_size=count))


class TorchSource(Source):
    """Read a PyTorch `DataLoader`. Its order is known if it is not shuffled, or if it has a generator or an epoch."""

    advice = (
        "pass generator=torch.Generator() to the DataLoader, whose order comes from PyTorch's global generator, or use "
        "torchdata's StatefulDataLoader"
    )

    def __init__(self, data: Any) -> None:
        from torch.utils import data as torch_data

        super().__init__(data)
        self.kind = "torch.DataLoader"
        batch_sampler = data.batch_sampler
        if isinstance(data.dataset, torch_data.IterableDataset):
            sampler = None
        elif batch_sampler is None or type(batch_sampler) is torch_data.BatchSampler:
            sampler = data.sampler
        else:
            sampler = batch_sampler
        is_ordered = isinstance(sampler, torch_data.SequentialSampler) or hasattr(sampler, "set_epoch")
        self._generator = getattr(sampler, "generator", None)
        if sampler is None:
            self.advice = "use torchdata's StatefulDataLoader, which has a position"
        elif is_ordered or self._generator is not None:
            self.resume, self.advice = "exact", ""

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass with the generator in `state`, if it is given, and drop `start` batches."""
        if self._generator is not None and state is not None:
            self._generator.set_state(state)
        initial = self._get_generator_state()  # the order of the pass is drawn from it
        return Pass(self._skip(iter(self.data), start), initial)

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state of the generator, from which the order of the next pass is drawn."""
        return self._get_generator_state()

    def _get_generator_state(self) -> Any:
        return None if self._generator is None else self._generator.get_state()


class TensorFlowSource(Source):
    """Read a `tf.data.Dataset`; its position is a TensorFlow checkpoint of the iterator, with its shuffle buffers."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 100  # writing one takes about as long as many batches

    def __init__(self, data: Any) -> None:
        self.data = data
        self.kind = "tf.data.Dataset"
        cardinality = int(data.cardinality())
        self.length = cardinality if cardinality >= 0 else None
        self._epoch = 0
        self._next: tuple[int, Any] | None = None  # the number of the next pass, and its iterator

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass. A dataset of known length is one endless repetition, which shuffles each pass differently."""
        following, self._next = self._next, None
        if following is not None and following[0] == epoch and start == 0 and state is None:
            iterator = following[1]
        else:
            iterator = self._iterate()
            if state is not None:
                _restore_iterator(iterator, state)
            elif self.length is not None:
                start += epoch * self.length
            self._skip(iterator, start)
        self._epoch = epoch
        if self.length is not None:
            self._next = (epoch + 1, iterator)
        return Pass(iterator, _save_iterator(iterator))

    def get_state(self, reading: Pass) -> Any:
        """Return the files of a TensorFlow checkpoint of the iterator, by name."""
        return _save_iterator(reading.iterator)

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state of the iterator of the next pass, whose order TensorFlow draws when it is made."""
        if self._next is None:
            self._next = (self._epoch + 1, self._iterate())
        return _save_iterator(self._next[1])

    def copy(self) -> "TensorFlowSource":
        """Return a source with iterators of its own."""
        return TensorFlowSource(self.data)

    def _iterate(self) -> Any:
        return iter(self.data.repeat() if self.length is not None else self.data)

    def shard(self, index: int, count: int) -> "TensorFlowSource":
        """Return the source of every `count`-th element from `index` on."""
        return TensorFlowSource(self.data.shard(count, index))


def as_source(data: Any) -> Source:
    """Return the source of an object that yields batches or examples.

    Raises:
      ConfigError: it can neither be iterated nor called, or it is a dataset with access by index.
    """
    if _is_of(data, "datasets") and is_map_style(data):
        raise _not_batches(data)
    if _is_of(data, "tensorflow_datasets"):
        data = getattr(data, "_ds", data)  # of `tfds.as_numpy`, which has no position, while this has one
    grain, torch, tensorflow = (sys.modules.get(name) for name in ("grain", "torch.utils.data", "tensorflow"))
    kinds: list[tuple[bool, Any]] = [
        (isinstance(data, list | tuple), SequenceSource),
        (grain is not None and isinstance(data, grain.MapDataset), GrainMapSource),
        (grain is not None and isinstance(data, (grain.IterDataset, grain.DataLoader)), GrainSource),
        (tensorflow is not None and isinstance(data, tensorflow.data.Dataset), TensorFlowSource),
        (_has_state_dict(data) and _is_of(data, "datasets"), HuggingFaceSource),
        (_has_state_dict(data) and _is_of(data, "torchdata"), TorchDataSource),
        (_has_state_dict(data), StateDictSource),
        (torch is not None and isinstance(data, torch.DataLoader), TorchSource),
        (hasattr(data, "__next__"), IteratorSource),
        (hasattr(data, "__iter__") and not isinstance(data, str | bytes), Source),
        (callable(data) and not isinstance(data, type), FunctionSource),
    ]
    for is_kind, kind in kinds:
        if is_kind:
            return kind(data)
    if hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        raise _not_batches(data)
    raise ConfigError(
        "a dataloader must be a config dict, an iterable of batches, or a function that returns an iterator, got "
        f"{data!r}"
    )


def is_stream(data: Any) -> bool:
    """Return whether an object can only be read in its own order: by iterating it, or a function's result."""
    if is_map_style(data) or isinstance(data, Mapping):
        return False
    return hasattr(data, "__iter__") or (callable(data) and not hasattr(data, "__getitem__"))


def _not_batches(data: Any) -> ConfigError:
    return ConfigError(
        f"a dataloader must be a config dict or an iterable of batches, got the dataset {type(data).__name__}; use "
        "dict(dataset=..., batch_size=...)"
    )


def is_map_style(data: Any) -> bool:
    """Return whether an object has a length and access by index, so that batches are chosen by a sampler."""
    if isinstance(data, Mapping) or not hasattr(data, "__len__"):
        return False
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        return False
    return hasattr(data, "__getitem__") or hasattr(data, "__getitems__")


def set_epoch(data: Any, epoch: int) -> None:
    """Pass the epoch to `set_epoch` of the data, its sampler, its batch sampler or the sampler of that: the first."""
    batch_sampler = getattr(data, "batch_sampler", None)
    owners = [data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
            return


def _length(data: Any) -> int | None:
    try:
        return len(data)
    except TypeError:
        return None


def _is_of(data: Any, package: str) -> bool:
    return type(data).__module__.partition(".")[0] == package


def _has_state_dict(data: Any) -> bool:
    return hasattr(data, "state_dict") and hasattr(data, "load_state_dict")


def _has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a stream of Hugging Face `datasets` has a shuffle buffer in a step, or unknown steps."""
    nodes: list[Any] = [getattr(stream, "_ex_iterable", None)]
    for node in nodes:
        if node is None or (type(node).__name__.startswith("BufferShuffled") and node.buffer_size > 1):
            return True
        nodes += [node.ex_iterable] if hasattr(node, "ex_iterable") else getattr(node, "ex_iterables", [])
    return False


def _has_iterator_state(data: Any) -> bool:
    return hasattr(data, "get_state") and hasattr(data, "set_state")


def _parse_flags() -> None:
    """Mark absl's flags as parsed: grain's workers read them, and a script without absl never parses them."""
    from absl import flags

    if not flags.FLAGS.is_parsed():
        flags.FLAGS.mark_as_parsed()


def _save_iterator(iterator: Any) -> dict[str, bytes]:
    import pathlib
    import tempfile

    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        tf.train.Checkpoint(iterator=iterator).write(f"{directory}/iterator")
        return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


def _restore_iterator(iterator: Any, state: Mapping[str, bytes]) -> None:
    import pathlib
    import tempfile

    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        for name, content in state.items():
            (pathlib.Path(directory) / pathlib.Path(name).name).write_bytes(content)
        tf.train.Checkpoint(iterator=iterator).read(f"{directory}/iterator").assert_consumed()


_END = object()
