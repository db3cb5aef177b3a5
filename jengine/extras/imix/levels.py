"""iMIX's levels of hooks, 0 to 60; lower values run first."""

import enum
import warnings
from typing import Any

from jengine.config.errors import closest
from jengine.hooks.priority import Priority


class PriorityStatus(enum.IntEnum):
    """iMIX's levels."""

    HIGHEST = 0
    HIGHER = 10
    HIGH = 20
    NORMAL = 30
    LOW = 40
    LOWER = 50
    LOWEST = 60


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


def read_level(level: Any) -> Priority:
    """Return the priority for `level` in the config of a hook."""
    return to_priority(get_level(level))
