"""Hook priorities: nine names for the integers 0 to 100; the lower value runs first."""

import enum

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
