"""Inheritance between configs, by MMEngine's rule."""

from typing import Any, TypeVar

from jengine.config.containers import assign, config_dict, copied, current, is_mapping
from jengine.config.resolve import resolve

C = TypeVar("C")


def merge(base: C, override: Any) -> C:
    """A config that inherits from another.

    Dicts merge key by key at every level. A dict with `_delete_=True` takes the place of the base's dict instead of
    merging with it. Lists, tuples and all other values of `override` take the place of the base's.

    Args:
      base: a dict or a ConfigDict; it is left as it was. Its references stay references, so that a later override
        of a value reaches whoever refers to it.
      override: a dict or a ConfigDict with what differs; its references are resolved.

    Returns:
      A new config of the type of `base`.

    Raises:
      TypeError: one of them is no config, or a dict stands where the base has something else.
    """
    changes = resolve(override)
    if not is_mapping(base):
        raise TypeError(f"a config is a ConfigDict or a dict, found {type(base).__name__}: {base!r}")
    if changes.get("_delete_"):
        kept = without_delete(changes)
        return kept if isinstance(base, dict) else config_dict(kept)
    result = copied(base)
    merge_into(result, changes)
    return result


def merge_into(base: Any, changes: dict[str, Any]) -> None:
    """Like `merge`, in place; `changes` is a resolved config."""
    for key, value in changes.items():
        if key == "_delete_":
            continue
        old = current(base, key)
        if not isinstance(value, dict) or value.get("_delete_") or old is None:
            assign(base, key, without_delete(value))
        elif is_mapping(old):
            merge_into(old, value)
        else:
            raise TypeError(
                f"{key!r} is {type(old).__name__} in the base config and a dict in the one that inherits from it; "
                "add `_delete_=True` to the dict to put it in its place"
            )


def without_delete(value: Any) -> Any:
    """`value` with no `_delete_` left in any dict of it, outside lists."""
    if isinstance(value, dict):
        return {key: without_delete(item) for key, item in value.items() if key != "_delete_"}
    return value
