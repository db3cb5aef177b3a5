"""Sources for grain, PyTorch, Hugging Face and TensorFlow, which store positions differently."""

import dataclasses
import pathlib
import sys
import tempfile
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jengine.data.find_source import is_map_style, not_batches
from jengine.data.sources import (
    DataSource,
    Pass,
    Resume,
    SourceState,
    find_length,
    skip,
    state_dict_source,
)
from jengine.extras.augment.grain_sources import grain_map_source, grain_source

if TYPE_CHECKING:
    import datasets
    import tensorflow
    import torch.utils.data
    from torchdata.stateful_dataloader import StatefulDataLoader

_END = object()


def find_library_source(data: Any) -> DataSource | None:
    """Return the source for an object of one of these libraries; None for other objects.

    The first that fits: a library's own position is exact where the general ones would read and
    drop.
    """
    library = type(data).__module__.partition(".")[0]
    if (grain := sys.modules.get("grain")) is not None:
        if isinstance(data, grain.MapDataset):
            return grain_map_source(data)
        if isinstance(data, grain.IterDataset | grain.DataLoader):
            return grain_source(data)
    if library == "datasets" and is_map_style(data):
        raise not_batches(data)
    if library == "tensorflow_datasets":
        # of `tfds.as_numpy`, which has no position, while this has one
        data = getattr(data, "_ds", data)
    # A library that is not imported cannot have made the object, so none is imported here.
    torch, tensorflow = (sys.modules.get(name) for name in ("torch.utils.data", "tensorflow"))
    has_state_dict = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        return tensorflow_source(data)
    if has_state_dict:
        build = {"datasets": hugging_face_source, "torchdata": torchdata_source}.get(library)
        return build and build(data)
    if torch is not None and isinstance(data, torch.DataLoader):
        return torch_source(data)
    return None


def torchdata_source(data: "StatefulDataLoader") -> DataSource:
    """Return the source for torchdata's `StatefulDataLoader`.

    The state after a pass determines the next order.
    """
    source = state_dict_source(data)

    def get_end_state(reading: Pass) -> SourceState:
        is_end = next(reading.iterator, _END) is _END  # else a limit cuts the pass short
        return source.get_state(reading) if is_end else None

    return dataclasses.replace(source, get_end_state=get_end_state)


def hugging_face_source(data: "datasets.IterableDataset") -> DataSource:
    """Return the source for a Hugging Face `datasets` stream, whose order is a function of seed
    and epoch.
    """

    # shards, or examples if the shards do not divide
    def shard(index: int, count: int) -> DataSource:
        from datasets.distributed import split_dataset_by_node

        return hugging_face_source(split_dataset_by_node(data, rank=index, world_size=count))

    source = dataclasses.replace(
        state_dict_source(data), kind="datasets.IterableDataset", shard=shard
    )
    if not _has_shuffle_buffer(data):
        return source
    # The state lacks the content of shuffle buffers, so the elements before the position are read
    # and dropped.
    advice = (
        "shuffle the shards alone, .shuffle(seed=..., buffer_size=1), or use a map-style dataset"
    )
    return dataclasses.replace(source, resume="replayed", snapshot_interval=None, advice=advice)


def torch_source(data: "torch.utils.data.DataLoader") -> DataSource:
    """Return the source for a PyTorch `DataLoader`, whose order may be known."""
    from torch.utils import data as torch_data

    batch_sampler = data.batch_sampler
    sampler = None
    if not isinstance(data.dataset, torch_data.IterableDataset):
        is_default = batch_sampler is None or type(batch_sampler) is torch_data.BatchSampler
        sampler = data.sampler if is_default else batch_sampler
    generator = getattr(sampler, "generator", None)
    is_ordered = isinstance(sampler, torch_data.SequentialSampler) or hasattr(sampler, "set_epoch")
    advice = (
        "pass generator=torch.Generator() to the DataLoader, whose order comes from PyTorch's "
        "global generator, or use torchdata's StatefulDataLoader"
    )
    if sampler is None:
        advice = "use torchdata's StatefulDataLoader, which has a position"
    elif is_ordered or generator is not None:
        advice = ""

    def get_state(_: Pass | None = None) -> SourceState:
        return None if generator is None else generator.get_state()

    def open_pass(epoch: int, start: int, state: SourceState) -> Pass:
        if generator is not None and state is not None:
            generator.set_state(state)
        initial = get_state()  # the order of the pass is drawn from it
        return Pass(skip(iter(data), start), initial)

    resume: Resume = "replayed" if advice else "exact"
    return DataSource(
        data,
        "torch.DataLoader",
        open_pass,
        find_length(data),
        resume,
        advice,
        get_end_state=get_state,
    )


def tensorflow_source(data: "tensorflow.data.Dataset") -> DataSource:
    """Return the source for a `tf.data.Dataset`.

    A position is a TensorFlow checkpoint, with shuffle buffers.

    A dataset with known length is one endless repetition, which shuffles each pass differently.
    """
    cardinality = int(data.cardinality())
    length = cardinality if cardinality >= 0 else None
    following: tuple[int, Any] = (-1, None)  # the number of the next pass, and its iterator
    current = 0

    def iterate() -> Any:
        return iter(data.repeat() if length is not None else data)

    def open_pass(epoch: int, start: int, state: SourceState) -> Pass:
        nonlocal following, current
        next_epoch, iterator = following
        if next_epoch != epoch or start or state is not None:
            iterator = iterate()
            if state is not None:
                _restore_iterator(iterator, state)
            elif length is not None:
                start += epoch * length
            skip(iterator, start)
        current = epoch
        following = (-1, None) if length is None else (epoch + 1, iterator)
        return Pass(iterator, _save_iterator(iterator))

    def get_end_state(reading: Pass) -> SourceState:
        nonlocal following
        if following[1] is None:
            following = (current + 1, iterate())  # TensorFlow draws the order of the next pass here
        return _save_iterator(following[1])

    return DataSource(
        data,
        "tf.data.Dataset",
        open_pass,
        length,
        "exact",
        snapshot_interval=100,  # writing a checkpoint takes about as long as many batches
        get_state=lambda reading: _save_iterator(reading.iterator),
        get_end_state=get_end_state,
        shard=lambda index, count: tensorflow_source(data.shard(count, index)),
        copy=lambda: tensorflow_source(data),  # with its own iterators
    )


def _has_shuffle_buffer(stream: Any) -> bool:
    """Return whether a Hugging Face stream has a shuffle buffer in a step, or unknown steps."""
    # Private attributes: the library has no question for it, and a buffer makes its own state
    # useless for a resume. What is unknown counts as one.
    nodes: list[Any] = [getattr(stream, "_ex_iterable", None)]
    for node in nodes:
        if node is None or (
            type(node).__name__.startswith("BufferShuffled") and node.buffer_size > 1
        ):
            return True
        nodes += (
            [node.ex_iterable]
            if hasattr(node, "ex_iterable")
            else getattr(node, "ex_iterables", [])
        )
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
