"""Whole numbers that change at some iterations: batch sizes, accumulation, and the length of
examples.
"""

import bisect
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

from jengine.config.annotations import Count, is_mapping
from jengine.config.errors import ConfigError
from jengine.config.registry import check_arguments


@dataclasses.dataclass(frozen=True)
class StepValues:
    """Number that is a function of the iteration: `values[i]` from `milestones[i - 1]` on.

    In a config it is `dict(type='StepValues', values=[64, 128], milestones=[1000])`.

    >>> sizes = StepValues([64, 128, 256], milestones=[1000, 2000])
    >>> sizes.at(999), sizes.at(1000), sizes.next_change(1000)
    (64, 128, 2000)

    Args:
      values: the numbers in order, at least 1 each.
      milestones: the iterations, counted from 0, that are the first with the next number, in
        ascending order.

    Raises:
      ConfigError: the milestones do not ascend, or are not one fewer than the values.
    """

    values: Sequence[Count]
    milestones: Sequence[Count]

    def __post_init__(self) -> None:
        if len(self.values) != len(self.milestones) + 1:
            raise ConfigError(
                f"`milestones` must be one fewer than `values`, got {len(self.milestones)} and "
                f"{len(self.values)}"
            )
        if list(self.milestones) != sorted(set(self.milestones)):
            raise ConfigError(
                f"`milestones` must be in ascending order, got {list(self.milestones)}"
            )

    def at(self, step: int) -> int:
        """Return the number in iteration `step`."""
        return self.values[bisect.bisect_right(self.milestones, step)]

    def start(self, step: int) -> int:
        """Return the first iteration with the number of iteration `step`."""
        index = bisect.bisect_right(self.milestones, step)
        return self.milestones[index - 1] if index else 0

    def next_change(self, step: int) -> int | float:
        """Return the first iteration after `step` with another number.

        `math.inf` if there is none.
        """
        index = bisect.bisect_right(self.milestones, step)
        return self.milestones[index] if index < len(self.milestones) else math.inf

    def __str__(self) -> str:
        later = (
            f"{value} from iteration {at}"
            for value, at in zip(self.values[1:], self.milestones, strict=True)
        )
        return ", ".join([str(self.values[0]), *later])


class FollowsSteps:
    """Base of the loaders: batch sizes and lengths of examples that follow the iteration.

    Attributes:
      batch_sizes, example_lengths: the numbers; None for constant ones.
      example_length: the current one; None for a constant one.
    """

    batch_sizes: StepValues | None = None
    example_lengths: StepValues | None = None
    example_length: int | None = None
    dataset: Any
    _size: int | None  # examples in a batch now

    @property
    def metainfo(self) -> Any:
        """The dataset's metainfo (class names and so on); None if it has none."""
        return getattr(self.dataset, "metainfo", None)

    def follow(self, batch_sizes: StepValues | None, example_lengths: StepValues | None) -> None:
        """Let the batch size and the length of examples follow the iteration.

        `set_step` then says which it is.
        """
        self.batch_sizes = batch_sizes
        self.example_lengths = example_lengths
        self.set_step(0)

    def set_step(self, step: int) -> bool:
        """Use the batch size and the length of examples of iteration `step`.

        Return whether one has changed.

        Load a position afterwards: the next batch then starts at the example where the last one has
        ended.
        """
        lengths = self.example_lengths
        length = self.example_length if lengths is None else lengths.at(step)
        size = self._size if self.batch_sizes is None else self.batch_sizes.at(step)
        changed = (length, size) != (self.example_length, self._size)
        if changed:
            self.example_length = length
            self._size = size
            self._apply()
            self.close()  # workers have copies of the settings, or have read a batch ahead
        return changed

    def next_change(self, step: int) -> int | float:
        """Return the next iteration with another batch size or length of examples.

        `math.inf` for none.
        """
        schedules = (self.batch_sizes, self.example_lengths)
        return min((x.next_change(step) for x in schedules if x is not None), default=math.inf)

    def _apply(self) -> None:
        """Use another `_size` and `example_length`."""
        raise NotImplementedError

    def close(self) -> None:
        """End threads and worker processes, if there are any."""


StepCount: TypeAlias = Count | StepValues | Mapping[str, Any]


def is_step_values(value: Any) -> bool:
    """Return whether a setting is `StepValues`, or a config for them."""
    return isinstance(value, StepValues) or (
        hasattr(value, "items") and value.get("type") in ("StepValues", StepValues)
    )


def parse_step_values(value: Any) -> StepValues:
    """Return `StepValues` from an object, a config, or one number.

    >>> (
    ...     parse_step_values(dict(type="StepValues", values=[2, 1], milestones=[10])).at(10),
    ...     parse_step_values(4).at(7),
    ... )
    (1, 4)

    Raises:
      ConfigError: another mapping, or illegal numbers.
    """
    if isinstance(value, StepValues):
        return value
    if is_mapping(value) and not is_step_values(value):
        raise ConfigError(
            "a number that changes must be dict(type='StepValues', values=[...], "
            f"milestones=[...]), got {dict(value)}"
        )
    if not is_step_values(value):
        return StepValues([value], [])
    arguments = {key: list(item) for key, item in value.items() if key != "type"}
    check_arguments(StepValues, arguments)
    return StepValues(**arguments)
