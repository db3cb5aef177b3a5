"""Checks of arguments inside dicts, which annotations cannot express."""

from typing import Any

from jengine.errors import ConfigError


def check_integer(name: str, value: Any, minimum: int = 1) -> None:
    """Raise ConfigError unless an argument is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:  # a bool is an int
        raise ConfigError(f"{name} must be an integer of at least {minimum}, got {value!r}")
