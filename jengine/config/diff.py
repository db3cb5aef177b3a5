"""Differences between two configs."""

import json
from typing import Any

from jengine.config.containers import ConfigLike
from jengine.config.description import flatten_description
from jengine.config.dump import format_config, parse_config

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
    one, two = (_flatten(cfg) for cfg in (first, second))
    paths = dict.fromkeys([*one, *two])
    pairs = {path: (one.get(path, ABSENT), two.get(path, ABSENT)) for path in paths}
    # nan equals nan
    return {path: pair for path, pair in pairs.items() if repr(pair[0]) != repr(pair[1])}


def _flatten(cfg: ConfigLike) -> dict[str, Any]:
    parsed = parse_config(format_config(cfg)[0], arrays=False)
    return flatten_description(json.loads(json.dumps(parsed, default=repr)))  # tuples become lists
