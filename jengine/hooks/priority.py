"""Define hook priorities: the nine names of MMEngine for 0 to 100, and the seven levels of iMIX for 0 to 60.

The lower value runs first.
"""

import enum
import warnings
from typing import Any

from jengine.errors import UnknownNameError, closest


class Priority(enum.IntEnum):
    """The named levels. Any integer in between is a priority too."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


def get_priority(priority: int | str | Priority) -> int:
    """The value of a priority.

    Args:
      priority: a level's name in any case, a `Priority`, or an integer from 0 to 100.

    Raises:
      ValueError: an integer outside 0 to 100. KeyError: an unknown name. TypeError: anything else.
    """
    if isinstance(priority, bool) or not isinstance(priority, int | str):
        raise TypeError(f"a priority is a name or an integer from 0 to 100, found {priority!r}")
    if isinstance(priority, str):
        if priority.upper() not in Priority.__members__:
            raise UnknownNameError(f"no priority is called {priority!r}{closest(priority, Priority.__members__)}")
        return int(Priority[priority.upper()])
    if not 0 <= priority <= 100:
        raise ValueError(f"a priority lies between 0 and 100, found {priority}")
    return int(priority)


def priority_name(priority: int | str | Priority) -> str:
    """The level's name where the value has one, else the number: as the hook table prints it."""
    value = get_priority(priority)
    return Priority(value).name if value in Priority._value2member_map_ else str(value)


class PriorityStatus(enum.IntEnum):
    """When a hook runs among others: the lower number first."""

    HIGHEST = 0
    HIGHER = 10
    HIGH = 20
    NORMAL = 30
    LOW = 40
    LOWER = 50
    LOWEST = 60


_ON_MMENGINES_SCALE = {
    PriorityStatus.HIGHEST: Priority.HIGHEST,
    PriorityStatus.HIGHER: Priority.VERY_HIGH,
    PriorityStatus.HIGH: Priority.HIGH,
    PriorityStatus.NORMAL: Priority.NORMAL,
    PriorityStatus.LOW: Priority.LOW,
    PriorityStatus.LOWER: Priority.VERY_LOW,
    PriorityStatus.LOWEST: Priority.LOWEST,
}


def get_level(level: Any) -> PriorityStatus:
    """The level that a config means.

    Args:
      level: a `PriorityStatus`, its name in any case, or its number.

    Returns:
      The level; NORMAL, with a warning, for anything else.
    """
    if isinstance(level, str) and level.upper() in PriorityStatus.__members__:
        return PriorityStatus[level.upper()]
    if isinstance(level, int) and not isinstance(level, bool) and level in PriorityStatus._value2member_map_:
        return PriorityStatus(level)
    legal = {**PriorityStatus.__members__, **{str(member.value): member for member in PriorityStatus}}
    warnings.warn(f"no level is {level!r}{closest(str(level), legal)}: NORMAL is taken", UserWarning, stacklevel=2)
    return PriorityStatus.NORMAL


def to_priority(level: PriorityStatus) -> Priority:
    """The priority on MMEngine's scale that keeps the order of the levels."""
    return _ON_MMENGINES_SCALE[level]
