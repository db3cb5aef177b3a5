"""Sources for grain, whose iterators have a position."""

import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from jengine.data.sources import DataSource, Pass, SourceState, find_length, skip
from jengine.extras.augment.worker_processes import parse_flags

if TYPE_CHECKING:
    import grain

_LOGGER = logging.getLogger("jengine")


def grain_source(data: "grain.IterDataset | grain.DataLoader") -> DataSource:
    """Return the source for a grain `IterDataset` or `DataLoader`, whose iterators have a state."""
    is_loader = type(data).__name__ == "DataLoader"
    kind = "grain.DataLoader" if is_loader else "grain.IterDataset"
    repeat = (
        "num_epochs=None in the sampler" if is_loader else ".repeat() before .to_iter_dataset()"
    )

    @functools.cache
    def warn() -> None:
        _LOGGER.warning(
            f"{kind}: each pass has the order of the first. For another order in each, use "
            f"{repeat}, and train_cfg.epoch_length in a loop over epochs."
        )

    def open_pass(epoch: int, start: int, state: SourceState) -> Pass:
        if epoch > 0:
            warn()
        parse_flags()
        iterator: Any = iter(data)
        if state is not None:
            iterator.set_state(state)
        return Pass(skip(iterator, start))

    get_state = lambda reading: reading.iterator.get_state()  # noqa: E731
    return DataSource(
        data, kind, open_pass, find_length(data), "exact", snapshot_interval=1, get_state=get_state
    )


def grain_map_source(data: "grain.MapDataset") -> DataSource:
    """Return the source for a grain `MapDataset`: pass e is the e-th repetition, shuffled with
    another seed.
    """
    length = None if len(data) >= sys.maxsize else len(data)

    def open_pass(epoch: int, start: int, state: SourceState) -> Pass:
        part = data
        if length is not None:  # starts at the element, without reading those before
            first = epoch * length + (0 if state is not None else start)
            part = data.repeat()[first : (epoch + 1) * length]
        elif state is None:
            part = data[start:]
        iterator: Any = iter(part.to_iter_dataset())
        if state is None:
            return Pass(iterator, offset=start)
        iterator.set_state(dict(state))
        return Pass(skip(iterator, start))

    def get_state(reading: Pass) -> SourceState:
        state = reading.iterator.get_state()
        return {**state, "next_index": state["next_index"] + reading.offset}  # in the repetition

    return DataSource(
        data,
        "grain.MapDataset",
        open_pass,
        length,
        "exact",
        snapshot_interval=1,
        may_be_shorter=True,  # filtered elements are left out
        get_state=get_state,
        shard=lambda index, count: grain_map_source(data[index::count]),
    )
