"""Durations in configs: '90s', '15m', '2h', '1d' or 'HH:MM:SS'."""

import re

_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([smhd])")
_CLOCK = re.compile(r"(\d+):([0-5]\d):([0-5]\d)")


def parse_duration(text: str) -> float:
    """Return the seconds in a duration; ValueError if it is none, or not above 0.

    >>> parse_duration("15m"), parse_duration("23:50:00")
    (900.0, 85800.0)
    """
    if match := _NUMBER.fullmatch(text):
        seconds = float(match[1]) * _SECONDS[match[2]]
    elif match := _CLOCK.fullmatch(text):
        seconds = int(match[1]) * 3600.0 + int(match[2]) * 60 + int(match[3])
    else:
        raise ValueError(f"a duration must be like '90s', '15m', '2h' or '23:50:00', got {text!r}")
    if seconds <= 0:
        raise ValueError(f"a duration must be above 0, got {text!r}")
    return seconds


class IsDuration:
    """Limit for text that `parse_duration` takes: `Annotated[str, IsDuration()]`."""

    def __contains__(self, text: str) -> bool:
        try:
            return parse_duration(text) > 0
        except ValueError:
            return False

    def __str__(self) -> str:
        return "like '90s', '15m', '2h' or '23:50:00'"
