"""The seven levels of iMIX, on which 30 is what 50 is on MMEngine's scale."""

import enum
import warnings
from typing import Any

from jengine.errors import closest
from jengine.hooks.priority import Priority


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
