"""How a config is held in memory: ConfigDicts and plain dicts, lists, tuples and references between values.

What ml_collections does not do is done here once: its ConfigDicts lose `allow_dotted_keys` when they are copied, sort
their keys, and leave the dicts of a list alone.
"""

import copy
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict, FieldReference


def is_mapping(value: Any) -> bool:
    """Whether `value` is a level of a config. Other mappings (a FrozenDict of parameters, say) are values."""
    return isinstance(value, dict | ConfigDict)


def entries(mapping: Any) -> Iterable[tuple[Any, Any]]:
    """The keys and values of a level; references come as they are, not as what they stand for."""
    if isinstance(mapping, ConfigDict):
        return mapping.iteritems(preserve_field_references=True)
    return mapping.items()


def config_dict(mapping: Any, memo: dict[int, Any] | None = None) -> ConfigDict:
    """A ConfigDict with the values of `mapping`, at every level.

    Keys keep their order and may have dots, and a value may be replaced by one of another type. References keep
    referring to each other. Containers are copied, all other values are shared with `mapping`.

    Args:
      mapping: a dict or a ConfigDict.
      memo: copies by the id of their originals, as `copy.deepcopy` keeps them.
    """
    memo = {} if memo is None else memo
    if id(mapping) in memo:
        return memo[id(mapping)]
    result = ConfigDict(type_safe=False, allow_dotted_keys=True, sort_keys=False)
    if isinstance(mapping, ConfigDict):  # a ConfigDict in two places is one; a plain dict in two places is two
        memo[id(mapping)] = result
    for key, value in entries(mapping):
        result[key] = config_dict(value, memo) if is_mapping(value) else copied(value, memo)
    return result


def copied(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """`value` with its containers and references copied and everything else shared."""
    memo = {} if memo is None else memo
    if isinstance(value, FieldReference):
        return copy.deepcopy(value, memo)
    if isinstance(value, ConfigDict):
        return config_dict(value, memo)
    if isinstance(value, dict):
        return {key: copied(item, memo) for key, item in value.items()}
    if type(value) in (list, tuple):  # subclasses (a NamedTuple such as an optax transformation) are values
        return type(value)(copied(item, memo) for item in value)
    return value


def current(mapping: Any, key: Any) -> Any:
    """The value at `mapping[key]`; None for a key that is not there and for a placeholder that is still empty."""
    if key not in mapping:
        return None
    value = dict(entries(mapping))[key]
    if isinstance(value, FieldReference):
        return None if value.empty() else value.get()
    return value


def assign(mapping: Any, key: Any, value: Any) -> None:
    """Sets `mapping[key]`, or what the reference there stands for.

    Below a ConfigDict a dict becomes one that takes keys with dots as well.
    """
    if isinstance(mapping, ConfigDict):
        mapping[key] = config_dict(value) if isinstance(value, dict) else value
    elif isinstance(mapping.get(key), FieldReference):
        mapping[key].set(value, type_safe=False)
    else:
        mapping[key] = value
