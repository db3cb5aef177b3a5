"""Differences between two configs."""

from typing import Any

from jengine.config.containers import ConfigLike, resolve
from jengine.config.description import describe, flatten_description

ABSENT = ...  # in place of a value that one of two configs does not have


def diff_configs(first: ConfigLike, second: ConfigLike) -> dict[str, tuple[Any, Any]]:
    """Return the values that differ between two configs, by path; `...` where one config has none.

    Classes and functions are compared by import path, and lists item by item.

    >>> diff_configs(
    ...     {"lr": 0.1, "hooks": [{"interval": 1}]},
    ...     {"lr": 0.1, "hooks": [{"interval": 2}], "seed": 0},
    ... )
    {'hooks[0].interval': (1, 2), 'seed': (Ellipsis, 0)}
    """
    one, two = (flatten_description(describe(resolve(cfg))) for cfg in (first, second))
    paths = dict.fromkeys([*one, *two])
    pairs = {path: (one.get(path, ABSENT), two.get(path, ABSENT)) for path in paths}
    return {path: pair for path, pair in pairs.items() if pair[0] != pair[1]}
