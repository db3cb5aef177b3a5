"""Resolve a config to a plain dict, and check its keys."""

from collections.abc import Iterable
from typing import Any

from ml_collections import FieldReference

from jengine.config.containers import entries, is_mapping
from jengine.errors import ConfigError, closest, config_path, current_config_path


def resolve(cfg: Any) -> dict[str, Any]:
    """The config as one plain nested dict.

    References are replaced by their values and ConfigDicts by dicts, inside lists and tuples too. Classes, functions
    and other objects stay as they are.

    Args:
      cfg: a dict or a ConfigDict; it is left as it was.

    Returns:
      New dicts, lists and tuples, in the order of the source (a ConfigDict sorts its keys unless told otherwise).

    Raises:
      TypeError: `cfg` is neither.
      ml_collections.config_dict.RequiredValueError: a required placeholder is still empty; a note says which.
    """
    if not is_mapping(cfg):
        raise TypeError(f"a config is a ConfigDict or a dict, found {type(cfg).__name__}: {cfg!r}")
    return _plain(cfg)


def _plain(value: Any) -> Any:
    if isinstance(value, FieldReference):
        return _plain(value.get())
    if is_mapping(value):
        result = {}
        for key, item in entries(value):
            with config_path(key):
                result[key] = _plain(item)
        return result
    if type(value) in (list, tuple):
        items = []
        for index, item in enumerate(value):
            with config_path(index):
                items.append(_plain(item))
        return type(value)(items)
    return value


def check_keys(cfg: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Refuses a key that nobody would read.

    Args:
      cfg: the keys of one level (a dict or a ConfigDict will do).
      known: the legal keys of that level.
      hint: what to say besides, in a few words, such as where a user's own values belong.

    Raises:
      ConfigError: an unknown key, with the closest legal one.
    """
    names = set(known)
    for key in cfg:
        if key not in names:
            level = f"`{current_config_path()}`" if current_config_path() else "the top level of the config"
            raise ConfigError(f"unknown key {key!r} at {level}{closest(str(key), names)}{f' ({hint})' if hint else ''}")
