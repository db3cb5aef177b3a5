"""Hook priorities: MMEngine's nine names for 0 to 100; lower values run first."""

import enum

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
