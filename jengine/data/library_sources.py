"""Sources for grain, PyTorch, Hugging Face and TensorFlow, each of which stores a position differently."""

import logging
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

from jengine.data.batch_prefetcher import parse_flags
from jengine.data.sources import Pass, Resume, Source, StateDictSource, skip

_LOGGER = logging.getLogger("jengine")
_END = object()


class GrainSource(Source):
    """Grain `IterDataset` or `DataLoader`, whose iterators have a state."""

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
        parse_flags()
        iterator = iter(self.data)
        if state is not None:
            iterator.set_state(state)
        return Pass(skip(iterator, start))

    def get_state(self, reading: Pass) -> Any:
        """Return the iterator's state."""
        return reading.iterator.get_state()  # type: ignore[attr-defined]


class GrainMapSource(Source):
    """Grain `MapDataset`: pass e is the e-th repetition, which it shuffles with another seed."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 1
    may_be_shorter = True  # filtered elements are left out

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.kind = "grain.MapDataset"
        self.length = None if len(data) >= sys.maxsize else len(data)

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start at element `start` in repetition `epoch`, without reading those before."""
        data = self.data
        if self.length is not None:
            first = epoch * self.length + (0 if state is not None else start)
            data = data.repeat()[first : (epoch + 1) * self.length]
        elif state is None:
            data = data[start:]
        iterator = iter(data.to_iter_dataset())
        if state is None:
            return Pass(iterator, offset=start)
        iterator.set_state(dict(state))
        return Pass(skip(iterator, start))

    def get_state(self, reading: Pass) -> Any:
        """Return the next element's index in the repetition."""
        state = reading.iterator.get_state()  # type: ignore[attr-defined]
        return {**state, "next_index": state["next_index"] + reading.offset}

    def shard(self, index: int, count: int) -> "GrainMapSource":
        """Return the source for every `count`-th element from `index` on."""
        return GrainMapSource(self.data[index::count])


class TorchDataSource(StateDictSource):
    """Torchdata's `StatefulDataLoader`, whose state at the end of a pass determines the next pass's order."""

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state after the end; None if the pass is cut short by a limit."""
        return self.get_state(reading) if next(reading.iterator, _END) is _END else None


class HuggingFaceSource(StateDictSource):
    """Hugging Face `datasets` stream, whose order is a function of seed and epoch.

    The state lacks the content of shuffle buffers: with one, the elements before the position are read and dropped.
    """

    def __init__(self, data: Any) -> None:
        super().__init__(data)
        self.kind = "datasets.IterableDataset"
        if _has_shuffle_buffer(data):
            self.resume, self.snapshot_interval = "replayed", None
            self.advice = "shuffle the shards alone, .shuffle(seed=..., buffer_size=1), or use a map-style dataset"

    def shard(self, index: int, count: int) -> "HuggingFaceSource":
        """Return the source for every `count`-th shard, or for every `count`-th example if the shards do not divide."""
        from datasets.distributed import split_dataset_by_node

        return HuggingFaceSource(split_dataset_by_node(self.data, rank=index, world_size=count))


class TorchSource(Source):
    """PyTorch `DataLoader`. The order is known if it is not shuffled, or if it has a generator or an epoch."""

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
        return Pass(skip(iter(self.data), start), initial)

    def get_end_state(self, reading: Pass) -> Any:
        """Return the generator's state, from which the next pass's order is drawn."""
        return self._get_generator_state()

    def _get_generator_state(self) -> Any:
        return None if self._generator is None else self._generator.get_state()


class TensorFlowSource(Source):
    """`tf.data.Dataset`; the position is a TensorFlow checkpoint of the iterator, with shuffle buffers."""

    resume: Resume = "exact"
    snapshot_interval: int | None = 100  # writing one takes about as long as many batches

    def __init__(self, data: Any) -> None:
        self.data, self.kind = data, "tf.data.Dataset"
        cardinality = int(data.cardinality())
        self.length = cardinality if cardinality >= 0 else None
        self._epoch = 0
        self._next: tuple[int, Any] | None = None  # the number of the next pass, and its iterator

    def open(self, epoch: int, start: int = 0, state: Any = None) -> Pass:
        """Start a pass. A dataset with known length is one endless repetition, which shuffles each pass differently."""
        next_epoch, iterator = self._next or (None, None)
        if next_epoch != epoch or start or state is not None:
            iterator = self._iterate()
            if state is not None:
                _restore_iterator(iterator, state)
            elif self.length is not None:
                start += epoch * self.length
            skip(iterator, start)
        self._epoch = epoch
        self._next = None if self.length is None else (epoch + 1, iterator)
        return Pass(iterator, _save_iterator(iterator))

    def get_state(self, reading: Pass) -> Any:
        """Return the files in a TensorFlow checkpoint for the iterator, by name."""
        return _save_iterator(reading.iterator)

    def get_end_state(self, reading: Pass) -> Any:
        """Return the state of the next pass's iterator, whose order TensorFlow draws when it is made."""
        if self._next is None:
            self._next = (self._epoch + 1, self._iterate())
        return _save_iterator(self._next[1])

    def copy(self) -> "TensorFlowSource":
        """Return a source with separate iterators."""
        return TensorFlowSource(self.data)

    def _iterate(self) -> Any:
        return iter(self.data.repeat() if self.length is not None else self.data)

    def shard(self, index: int, count: int) -> "TensorFlowSource":
        """Return the source for every `count`-th element from `index` on."""
        return TensorFlowSource(self.data.shard(count, index))


def _has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a Hugging Face stream has a shuffle buffer in a step, or unknown steps."""
    nodes: list[Any] = [getattr(stream, "_ex_iterable", None)]
    for node in nodes:
        if node is None or (type(node).__name__.startswith("BufferShuffled") and node.buffer_size > 1):
            return True
        nodes += [node.ex_iterable] if hasattr(node, "ex_iterable") else getattr(node, "ex_iterables", [])
    return False


def _save_iterator(iterator: Any) -> dict[str, bytes]:
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        tf.train.Checkpoint(iterator=iterator).write(f"{directory}/iterator")
        return {path.name: path.read_bytes() for path in pathlib.Path(directory).iterdir()}


def _restore_iterator(iterator: Any, state: Mapping[str, bytes]) -> None:
    import tensorflow as tf

    with tempfile.TemporaryDirectory() as directory:
        for name, content in state.items():
            (pathlib.Path(directory) / pathlib.Path(name).name).write_bytes(content)
        tf.train.Checkpoint(iterator=iterator).read(f"{directory}/iterator").assert_consumed()
