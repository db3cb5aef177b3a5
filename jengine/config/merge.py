"""Config merging, by the rules of MMEngine's inheritance."""

from typing import Any, TypeVar

from jengine.config.containers import (
    ConfigLike,
    assign,
    copy_containers,
    get_value,
    is_level,
    resolve,
    to_config_dict,
)

C = TypeVar("C")


def merge(base: C, override: ConfigLike) -> C:
    """Return a config that inherits from `base`.

    Dicts merge key by key at every level. A dict with `_delete_=True` replaces the dict of `base`
    instead of merging with it. Lists, tuples and all other values of `override` replace the old
    ones.

    Args:
      base: a dict or a ConfigDict; it is not modified. References are kept, so a later override of
        a value will also change the values that refer to it.
      override: a dict or a ConfigDict with the differences; references are resolved.

    Returns:
      A new config of the same type as `base`.

    Raises:
      TypeError: an argument is not a config, a dict would merge with a value that is not a dict, or
        `_delete_` is not a bool.

    >>> merge({"optimizer": {"type": "SGD", "lr": 0.1}}, {"optimizer": {"lr": 0.2}})
    {'optimizer': {'type': 'SGD', 'lr': 0.2}}
    """
    changes = resolve(override)  # references of the other config would point out of this one
    if not is_level(base):
        raise TypeError(
            f"a config must be a ConfigDict or a dict, got {type(base).__name__}: {base!r}"
        )
    if replaces(changes):
        replacement = remove_delete_keys(changes)
        return replacement if isinstance(base, dict) else to_config_dict(replacement)
    result = copy_containers(base)
    merge_into(result, changes)
    return result


def merge_into(base: ConfigLike, changes: dict[str, Any]) -> None:
    """Merge `changes`, a resolved config, into `base` in place."""
    for key, value in changes.items():
        if key == "_delete_":  # callers treat a True, see `replaces`
            continue
        old = get_value(base, key)
        if not isinstance(value, dict) or replaces(value) or old is None:
            assign(base, key, remove_delete_keys(value))
        elif is_level(old):
            merge_into(old, value)
        else:
            raise TypeError(
                f"{key!r} must be a dict in the base config to merge with a dict, got "
                f"{type(old).__name__}; add `_delete_=True` to the new dict to replace the value"
            )


def replaces(value: dict[str, Any]) -> bool:
    """Return whether a dict has `_delete_=True`, so it replaces the dict in the base config."""
    flag = value.get("_delete_", False)
    if not isinstance(flag, bool):
        raise TypeError(f"`_delete_` must be True or False, got {flag!r}")
    return flag


def remove_delete_keys(value: Any) -> Any:
    """Return `value` without `_delete_` keys in dicts; lists are left unchanged."""
    if isinstance(value, dict):
        return {key: remove_delete_keys(item) for key, item in value.items() if key != "_delete_"}
    return value
