"""Validation of `paramwise_cfg`: legal fields and values."""

import math
from collections.abc import Iterable, Mapping, Sequence
from numbers import Real
from typing import Any

from jengine.config.annotations import is_host_number, is_mapping
from jengine.config.errors import ConfigError, closest

# Fields of a custom key that are not settings of a group, with a legal value each.
FIELDS = {"lr_mult": 1.0, "decay_mult": 1.0, "requires_grad": True}
# Flags that hooks and optimizers read from a group; legal even if they are not a setting of the
# optimizer.
FLAGS = {"fix_lr": False, "lars_exclude": False}
_NOT_NEGATIVE = ("lr", "weight_decay", "lr_mult", "decay_mult")


def parse_custom_keys(custom_keys: Any) -> dict[str, dict[str, Any]]:
    """Return `custom_keys` as a dict, in the original order.

    >>> parse_custom_keys([("backbone.layer0", dict(lr_mult=0.1))])
    {'backbone.layer0': {'lr_mult': 0.1}}

    Args:
      custom_keys: a dict, or a list of pairs (key, fields), because a ConfigDict cannot have keys
        with dots.

    Raises:
      TypeError: another type. ConfigError: a duplicate key, or multipliers that are not numbers of
        at least 0.
    """
    pairs = list(custom_keys.items()) if is_mapping(custom_keys) else custom_keys
    if not isinstance(pairs, list | tuple) or not all(
        isinstance(pair, list | tuple) and len(pair) == 2 and isinstance(pair[0], str)
        for pair in pairs
    ):
        raise TypeError(
            "paramwise_cfg.custom_keys must be a dict, or a list of pairs (key, dict(...)), "
            f"got {type(custom_keys).__name__}: {custom_keys!r}"
        )
    parsed: dict[str, dict[str, Any]] = {}
    for key, fields in pairs:
        if key in parsed:
            raise ConfigError(
                f"`paramwise_cfg.custom_keys` must have each key once, got {key!r} twice"
            )
        if not is_mapping(fields):
            raise ConfigError(
                f"`{_path(key)}` must be a dict such as dict(lr_mult=0.1), got {fields!r}"
            )
        parsed[key] = dict(fields.items())
        for name, example in FIELDS.items():
            if name in fields:
                check_value(_path(key, name), name, fields[name], example)
    return parsed


def check_custom_fields(
    custom_keys: Mapping[str, Mapping[str, Any]],
    optimizer: str,
    settings: Mapping[str, Any],
    more: Iterable[str] = (),
) -> None:
    """Check that every field in custom keys is known and has the right type.

    Raise ConfigError otherwise.

    Args:
      custom_keys: the result of `parse_custom_keys`.
      optimizer: optimizer name.
      settings: default group settings; values must have the same types.
      more: further legal fields, with any value.
    """
    known = {**FLAGS, **settings}
    legal = {*FIELDS, *known, *more}
    for key, fields in custom_keys.items():
        for name, value in fields.items():
            if name not in legal:
                raise ConfigError(
                    f"`{_path(key)}` must have the fields lr_mult, decay_mult, requires_grad or "
                    f"settings of {optimizer}'s groups, got {name!r}{closest(str(name), legal)}"
                )
            if name in known and name not in FIELDS:
                check_value(_path(key, name), name, value, known[name])


def check_value(path: str, name: str, value: Any, example: Any) -> None:
    """Check that a value is like `example`: a bool, a finite number, or equally many numbers.

    Raise ConfigError if not.

    Args:
      path: config path, for the message.
      name: setting name; learning rates, weight decays and multipliers must be at least 0.
      value: the value to check.
      example: a legal value; any other type allows all values.
    """
    # Before numbers: bool is an int in Python, and lr_mult=True would be a rate of 1.
    if isinstance(example, bool):
        if not isinstance(value, bool):
            raise ConfigError(f"`{path}` must be True or False, got {value!r}")
    elif isinstance(example, Real):
        legal = "a number of at least 0" if name in _NOT_NEGATIVE else "a number"
        if not _is_number(value) or (name in _NOT_NEGATIVE and value < 0):
            raise ConfigError(f"`{path}` must be {legal}, got {value!r}")
    elif isinstance(example, tuple | list) and example and all(map(_is_number, example)):
        has_numbers = (
            isinstance(value, Sequence)
            and not isinstance(value, str)
            and all(map(_is_number, value))
        )
        if not has_numbers or len(value) != len(example):
            raise ConfigError(f"`{path}` must be {len(example)} numbers, got {value!r}")


def _path(key: str, field: str = "") -> str:
    return f"paramwise_cfg.custom_keys[{key!r}]{'.' * bool(field)}{field}"


def _is_number(value: object) -> bool:
    return is_host_number(value) and math.isfinite(value)
