"""Recognition of the user's object: batches, a stream of examples, or a dataset with access by
index.
"""

import sys
from collections.abc import Mapping
from typing import Any

from jengine.config.errors import ConfigError
from jengine.config.plugins import load_each
from jengine.data import sources

# whose loaders have positions of their own
_LIBRARIES = frozenset(
    ("datasets", "grain", "tensorflow", "tensorflow_datasets", "torch", "torchdata")
)


def as_source(data: Any) -> sources.DataSource:
    """Return the source for an object that yields batches or examples.

    ConfigError if it does neither.
    """
    if isinstance(data, list | tuple):
        return sources.sequence_source(data)
    owners = {kind.__module__.partition(".")[0] for kind in type(data).__mro__}
    if libraries := sorted(owners & _LIBRARIES):
        finders = list(load_each("data_sources"))
        if not finders:
            raise ConfigError(
                f"a dataloader of {libraries[0]} needs an extra that reads its position, got "
                f"{type(data).__name__}"
            )
        for find in finders:
            if (source := find(data)) is not None:
                return source
    has_state_dict = hasattr(data, "state_dict") and hasattr(data, "load_state_dict")
    kinds: list[tuple[bool, Any]] = [
        (has_state_dict, sources.state_dict_source),
        (hasattr(data, "__next__"), sources.iterator_source),
        (hasattr(data, "__iter__") and not isinstance(data, str | bytes), sources.iterable_source),
        (callable(data) and not isinstance(data, type), sources.function_source),
    ]
    for is_kind, build in kinds:
        if is_kind:
            return build(data)
    if hasattr(data, "__getitem__") and not isinstance(data, str | bytes):
        raise not_batches(data)
    raise ConfigError(
        "a dataloader must be a config dict, an iterable of batches, or a function that returns "
        f"an iterator, got {data!r}"
    )


def is_stream(data: object) -> bool:
    """Return whether an object can only be read in its own order: by iterating it, or a
    function's result.
    """
    if is_map_style(data) or isinstance(data, Mapping):
        return False
    return hasattr(data, "__iter__") or (callable(data) and not hasattr(data, "__getitem__"))


def not_batches(data: object) -> ConfigError:
    """Return the error for a dataset where batches must be."""
    return ConfigError(
        "a dataloader must be a config dict or an iterable of batches, got the dataset "
        f"{type(data).__name__}; use dict(dataset=..., batch_size=...)"
    )


def is_map_style(data: object) -> bool:
    """Return whether an object has a length and access by index, so that a sampler can choose
    batches.
    """
    if isinstance(data, Mapping) or not hasattr(data, "__len__"):
        return False
    # Not imported: whoever passes such a dataset has imported TensorFlow, and others need not wait
    # for it.
    tensorflow = sys.modules.get("tensorflow")
    if tensorflow is not None and isinstance(data, tensorflow.data.Dataset):
        return False
    return hasattr(data, "__getitem__") or hasattr(data, "__getitems__")


def require_map_style(dataset: object) -> None:
    """Raise a TypeError unless `is_map_style`."""
    if not is_map_style(dataset):
        advice = "; wrap its arrays in ArrayDataset" if isinstance(dataset, Mapping) else ""
        kind = type(dataset).__name__
        raise TypeError(
            f"`dataset` must have __len__ and __getitem__ for 0 to N - 1, got {kind}{advice}"
        )


def set_epoch(data: object, epoch: int) -> None:
    """Pass the epoch to the first `set_epoch` in the data, the sampler, the batch sampler's
    sampler, and that.
    """
    # Where PyTorch, its samplers and users' loaders have the method: the first owner that has it
    # shuffles.
    batch_sampler = getattr(data, "batch_sampler", None)
    owners = [
        data,
        getattr(data, "sampler", None),
        getattr(batch_sampler, "sampler", None),
        batch_sampler,
    ]
    for owner in owners:
        if hasattr(owner, "set_epoch"):
            owner.set_epoch(epoch)
            return
