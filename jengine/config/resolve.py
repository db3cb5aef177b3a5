"""Plain dicts from configs, and the check for unknown keys."""

from collections.abc import Iterable
from typing import Any

from ml_collections import FieldReference

from jengine.config.containers import ConfigLike, is_mapping, iter_items
from jengine.errors import ConfigError, closest, config_path, current_config_path, list_unknown


def resolve(cfg: ConfigLike) -> dict[str, Any]:
    """Convert a config to one plain nested dict.

    References become values and ConfigDicts become dicts, in lists and tuples too. Classes, functions and other objects
    are not copied. The order is kept (a ConfigDict sorts keys by default).

    Raises:
      TypeError: `cfg` is neither a dict nor a ConfigDict.
      ml_collections.config_dict.RequiredValueError: a required placeholder is empty; a note has the path.

    >>> from ml_collections import ConfigDict
    >>> resolve({"train_cfg": ConfigDict({"max_epochs": 3})})
    {'train_cfg': {'max_epochs': 3}}
    """
    if not is_mapping(cfg):
        raise TypeError(f"a config must be a ConfigDict or a dict, got {type(cfg).__name__}: {cfg!r}")
    return _resolve_value(cfg)


def check_keys(cfg: Iterable[str], known: Iterable[str], hint: str = "") -> None:
    """Raise ConfigError for keys in `cfg` that are not `known`; the message names the closest legal one for each.

    `hint` adds a few words to the message, such as where the user's values belong.
    """
    names = set(known)
    unknown = [key for key in cfg if key not in names]
    if not unknown:
        return
    level = f"`{current_config_path()}`" if current_config_path() else "the top level of the config"
    end = f" ({hint})" if hint else ""
    if len(unknown) == 1:
        raise ConfigError(f"unknown key {unknown[0]!r} at {level}{closest(str(unknown[0]), names)}{end}")
    raise ConfigError(f"unknown keys at {level}: {list_unknown(map(str, unknown), names)}{end}")


def _resolve_value(value: Any) -> Any:
    if isinstance(value, FieldReference):
        return _resolve_value(value.get())
    if is_mapping(value):
        result = {}
        for key, item in iter_items(value):
            with config_path(key):
                result[key] = _resolve_value(item)
        return result
    if type(value) in (list, tuple):
        items = []
        for index, item in enumerate(value):
            with config_path(index):
                items.append(_resolve_value(item))
        return type(value)(items)
    return value
