"""Configs in memory: ConfigDicts and plain dicts, lists, tuples and references between values.

These functions make up for limits in ml_collections: ConfigDicts lose `allow_dotted_keys` when they
are copied, sort the keys, and do not convert dicts in lists.
"""

import copy
from collections.abc import Iterable
from typing import Any, TypeAlias, TypeGuard

from ml_collections import ConfigDict, FieldReference

from jengine.config.errors import (
    ConfigError,
    config_path,
    current_config_path,
    did_you_mean,
    list_unknown,
)

ConfigLike: TypeAlias = dict[Any, Any] | ConfigDict  # one level, with further ones in it
Key = str | int  # an int in a config that is not for jengine
_LEAVES = (bool, int, float, str, type(None), type)


class AttributeDict(dict[str, Any]):
    """Dict whose keys are also attributes: a level in a list, which a ConfigDict cannot hold.

    >>> AttributeDict(interval=5).interval
    5
    """

    def __getattr__(self, name: str) -> Any:
        if name not in self:
            raise AttributeError(f"the config has no key {name!r}{did_you_mean(name, self)}")
        return self[name]

    __setattr__ = dict.__setitem__
    __delattr__ = dict.__delitem__


def is_level(value: Any) -> TypeGuard[ConfigLike]:
    """Return whether `value` is a config level.

    Other mappings (a parameter FrozenDict, say) are values.
    """
    return isinstance(value, dict | ConfigDict)


def iter_items(mapping: ConfigLike) -> Iterable[tuple[Key, Any]]:
    """Iterate over keys and values, without resolving references."""
    if isinstance(mapping, ConfigDict):
        return mapping.items(preserve_field_references=True)
    return mapping.items()


def iter_nodes(node: Any, path: str = "") -> list[tuple[str, Any]]:
    """Return the path and value of each part of a config: the whole, then each dict, list and leaf
    in it.

    >>> iter_nodes({"hooks": [{"interval": 5}]})[-1]
    ('hooks[0].interval', 5)
    """
    nodes = []
    waiting = [(path, node)]
    while waiting:
        path, node = waiting.pop()
        nodes.append((path, node))
        if isinstance(node, dict | ConfigDict):
            for key, child in reversed(node.items()):
                waiting.append((f"{path}.{key}" if path else str(key), child))
        elif isinstance(node, list | tuple):
            for i in reversed(range(len(node))):
                waiting.append((f"{path}[{i}]", node[i]))
    return nodes


def resolve(cfg: ConfigLike) -> dict[str, Any]:
    """Convert a config to one plain nested dict.

    References become values and ConfigDicts become dicts, in lists and tuples too. Classes,
    functions and other objects are not copied. The order is kept (a ConfigDict sorts keys by
    default).

    Raises:
      TypeError: `cfg` is neither a dict nor a ConfigDict.
      ml_collections.config_dict.RequiredValueError: a required placeholder is empty; a note has the
        path.

    >>> from ml_collections import ConfigDict
    >>> resolve({"train_cfg": ConfigDict({"max_epochs": 3})})
    {'train_cfg': {'max_epochs': 3}}
    """
    if not is_level(cfg):
        raise TypeError(
            f"a config must be a ConfigDict or a dict, got {type(cfg).__name__}: {cfg!r}"
        )
    result: list[Any] = [None]
    tuples = []  # with their parents: made from lists at last, the innermost first
    waiting: list[tuple[Any, Any, Any, tuple[Key, ...]]] = [(cfg, result, 0, ())]
    while waiting:
        value, parent, key, path = waiting.pop()
        while isinstance(value, FieldReference):
            with config_path(*path):
                value = value.get()
        children: Iterable[tuple[Any, Any]] = ()
        if isinstance(value, ConfigDict):
            value = dict(value.items(preserve_field_references=True))
        if isinstance(value, dict):
            children = value.items()
            parent[key] = dict.fromkeys(value)
        elif type(value) in (list, tuple):
            children = enumerate(value)
            parent[key] = list(value)
            if type(value) is tuple:
                tuples.append((parent, key))
        else:
            parent[key] = value
        for name, child in children:
            if type(child) in _LEAVES:
                parent[key][name] = child
            else:
                waiting.append((child, parent[key], name, (*path, name)))
    for parent, key in reversed(tuples):
        parent[key] = tuple(parent[key])
    return result[0]


def to_config_dict(
    mapping: ConfigLike, memo: dict[int, Any] | None = None, *, kind: type = ConfigDict
) -> Any:
    """Convert a dict or a ConfigDict to a ConfigDict, or another `kind` of it, at every level.

    Keys stay in order and may have dots, and a value may be replaced by one with another type.
    References keep referring to each other. Containers are copied; all other values are shared.
    `memo` is as in `copy.deepcopy`.
    """
    memo = {} if memo is None else memo
    if id(mapping) in memo:
        return memo[id(mapping)]
    result = kind(type_safe=False, allow_dotted_keys=True, sort_keys=False)
    # a ConfigDict that is used twice stays one object; a plain dict becomes two
    if isinstance(mapping, ConfigDict):
        memo[id(mapping)] = result
    for key, value in iter_items(mapping):
        result[key] = (
            to_config_dict(value, memo, kind=kind)
            if is_level(value)
            else add_attributes(copy_containers(value, memo))
        )
    return result


def add_attributes(value: Any) -> Any:
    """Return `value` with the keys of dicts in lists also as attributes."""
    if isinstance(value, dict):
        return AttributeDict({key: add_attributes(item) for key, item in value.items()})
    return type(value)(map(add_attributes, value)) if type(value) in (list, tuple) else value


def copy_containers(value: Any, memo: dict[int, Any] | None = None) -> Any:
    """Copy the containers and references in `value`; everything else is shared."""
    memo = {} if memo is None else memo
    if isinstance(value, FieldReference):
        return copy.deepcopy(value, memo)
    if isinstance(value, ConfigDict):
        return to_config_dict(value, memo)
    if isinstance(value, dict):
        return {key: copy_containers(item, memo) for key, item in value.items()}
    # subclasses (a NamedTuple such as an optax transformation) are values
    if type(value) in (list, tuple):
        return type(value)(copy_containers(item, memo) for item in value)
    return value


def get_value(mapping: ConfigLike, key: Key) -> Any:
    """Return the value at `mapping[key]`, references resolved.

    None for a missing key and an empty placeholder.
    """
    if key not in mapping:
        return None
    value = dict(iter_items(mapping))[key]
    if isinstance(value, FieldReference):
        return None if value.empty() else value.get()
    return value


def assign(mapping: ConfigLike, key: Key, value: Any) -> None:
    """Set `mapping[key]`, or the reference stored there.

    Dicts in a ConfigDict become ConfigDicts.
    """
    if isinstance(mapping, ConfigDict):
        mapping[key] = to_config_dict(value) if isinstance(value, dict) else value
    elif isinstance(mapping.get(key), FieldReference):
        mapping[key].set(value, type_safe=False)
    else:
        mapping[key] = value


def check_keys(cfg: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Raise ConfigError for keys in `cfg` that are not `known`.

    The message names the closest legal one for each.

    `hint` adds a few words to the message if no legal key is close, such as where the user's values
    belong.
    """
    names = set(known)
    unknown = [key for key in cfg if key not in names]
    if not unknown:
        return
    level = f"`{current_config_path()}`" if current_config_path() else "the top level of the config"
    listed = list_unknown(map(str, unknown), names)
    message = f"unknown key{'s' * (len(unknown) > 1)} at {level}: {listed}"
    raise ConfigError(f"{message} ({hint})" if hint and "did you mean" not in message else message)
