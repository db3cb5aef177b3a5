"""Hook priorities: MMEngine's nine names for 0 to 100, and iMIX's seven levels for 0 to 60.

Lower values run first.
"""

import enum
import warnings
from typing import Any

from jengine.config.errors import UnknownNameError, closest


class Priority(enum.IntEnum):
    """MMEngine's priorities; you can use any integer in between too."""

    HIGHEST = 0
    VERY_HIGH = 10
    HIGH = 30
    ABOVE_NORMAL = 40
    NORMAL = 50
    BELOW_NORMAL = 60
    LOW = 70
    VERY_LOW = 90
    LOWEST = 100


class PriorityStatus(enum.IntEnum):
    """iMIX's levels."""

    HIGHEST = 0
    HIGHER = 10
    HIGH = 20
    NORMAL = 30
    LOW = 40
    LOWER = 50
    LOWEST = 60


def get_priority(priority: int | str | Priority) -> int:
    """Return the value of a `Priority`, a name in any case, or an integer from 0 to 100.

    Raises:
      ValueError: an integer outside 0 to 100. KeyError: an unknown name. TypeError: anything else.

    Examples:
      >>> get_priority("low")
      70
    """
    if isinstance(priority, bool) or not isinstance(priority, int | str):  # a bool is an int
        raise TypeError(f"a priority must be a name or an integer from 0 to 100, got {priority!r}")
    if isinstance(priority, str):
        if priority.upper() not in Priority.__members__:
            hint = closest(priority, Priority.__members__)
            raise UnknownNameError(
                f"a priority must be the name of a level, got {priority!r}{hint}"
            )
        return int(Priority[priority.upper()])
    if not 0 <= priority <= 100:
        raise ValueError(f"a priority must be between 0 and 100, got {priority}")
    return int(priority)


def get_priority_name(priority: int | str | Priority) -> str:
    """Return the name of a priority, or the number if it has none, for the table of hooks."""
    value = get_priority(priority)
    return Priority(value).name if value in Priority._value2member_map_ else str(value)


def get_level(level: Any) -> PriorityStatus:
    """Return an iMIX level by name, in any case, or number.

    NORMAL, with a warning, for anything else.
    """
    if isinstance(level, str) and level.upper() in PriorityStatus.__members__:
        return PriorityStatus[level.upper()]
    if (
        isinstance(level, int)
        and not isinstance(level, bool)
        and level in PriorityStatus._value2member_map_
    ):
        return PriorityStatus(level)
    legal = {
        **PriorityStatus.__members__,
        **{str(member.value): member for member in PriorityStatus},
    }
    hint = closest(str(level), legal)
    # A warning, as in iMIX, where an unknown level is NORMAL too.
    warnings.warn(
        f"a level must be one of iMIX's, got {level!r}{hint}; NORMAL is used",
        UserWarning,
        stacklevel=2,
    )
    return PriorityStatus.NORMAL


def to_priority(level: PriorityStatus) -> Priority:
    """Return the priority on MMEngine's scale for a level, in the same order."""
    # the others have the same name on both scales
    names = {"HIGHER": "VERY_HIGH", "LOWER": "VERY_LOW"}
    return Priority[names.get(level.name, level.name)]
