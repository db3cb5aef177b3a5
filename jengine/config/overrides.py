"""Overrides from the command line: `optim_wrapper.optimizer.lr=0.1`.

ml_collections' flags cannot replace a list, set None, change a type or add a key; these overrides
can.
"""

import ast
import itertools
import re
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jengine.config.containers import ConfigLike, assign, get_value, is_level, to_config_dict
from jengine.config.errors import ConfigError, closest
from jengine.config.merge import merge_into, remove_delete_keys, replaces

_PART = re.compile(
    r"""(?:^|\.)(?P<name>[^.\[\]]+) | \[(?P<index>-?\d+)\]
    | \[(?P<quote>['"])(?P<key>.+?)(?P=quote)\]""",
    re.X,
)
_WORDS = {
    "true": True,
    "false": False,
    "inf": float("inf"),
    "-inf": float("-inf"),
    "nan": float("nan"),
}


def apply_overrides(cfg: ConfigLike, overrides: Iterable[str]) -> ConfigDict:
    """Return a config with single values changed, as a new ConfigDict.

    An override is `path=value`. A path has dots between keys, and brackets around list indices and
    around keys that contain dots: `custom_hooks[0].interval`,
    `custom_keys['backbone.layer0'].lr_mult`. A leading `--config.` or `config.` is dropped. The
    value is a Python literal or a bare word, which is a string (except `true`, `false`, `inf` and
    `nan`). A dict merges with an existing dict, `_delete_=True` included; any other value replaces
    the old one, whatever type it has. Missing keys are added: they are checked when objects are
    built from the config.

    Args:
      cfg: a dict or a ConfigDict; it is not modified.
      overrides: applied in order.

    Raises:
      ConfigError: an override that cannot be parsed, a path through a value that is not a dict or a
        list, or an index out of range.

    >>> apply_overrides({"optimizer": {"lr": 0.1}}, ["optimizer.lr=0.2", "work_dir=runs"]).to_dict()
    {'optimizer': {'lr': 0.2}, 'work_dir': 'runs'}
    """
    if isinstance(overrides, str):
        raise TypeError(f"`overrides` must be a list of strings, got one string: {overrides!r}")
    # a copy, in which references stay connected: an override reaches all that refer to it
    result = to_config_dict(cfg)
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        path = (
            path.removeprefix("--config.")
            if "config" in result
            else re.sub(r"^(--)?config\.", "", path)
        )
        if not equals or not path:
            raise ConfigError(f"an override must have the form key.key=value, got {override!r}")
        if not text.strip():
            raise ConfigError(
                f"override {override!r} has no value; write {path}='' for an empty string"
            )
        try:
            set_path(result, path, parse_value(text.strip()))
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"override {override!r}: {error}") from None
    return result


def set_path(cfg: ConfigLike, path: str, value: Any) -> None:
    """Set the value at a path in `cfg`, in place; path and errors as in `apply_overrides`.

    >>> cfg = {"hooks": [{"interval": 1}]}
    >>> set_path(cfg, "hooks[0].interval", 5)
    >>> cfg
    {'hooks': [{'interval': 5}]}
    """
    _set_value(cfg, _split_path(path), value, "")


def _split_path(path: str) -> list[str | int]:
    parts: list[str | int] = []
    position = 0  # `_PART` must match without gaps, which `findall` would skip
    while position < len(path):
        match = _PART.match(path, position)
        if match is None:
            raise ConfigError(
                f"cannot parse {path[position:]!r} in the key; write it like hooks[0].interval or "
                "a['b.c'].d"
            )
        index = match["index"]
        parts.append(int(index) if index is not None else match["name"] or match["key"])
        position = match.end()
    return parts


def parse_value(text: str) -> Any:
    """Return a Python literal, or a bare word as a string."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        # A literal or a string: an override comes from a shell and must not run code.
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if text[0] in "[({'\"":
            raise ConfigError(
                "a value that begins with a bracket or a quote must be a Python literal, got "
                f"{text}; quote strings inside brackets, or the whole string"
            ) from None
        return text


def _set_value(node: Any, parts: list[str | int], value: Any, path: str) -> Any:
    """Set the value at `parts` below `node`, which is at `path`, and return the new node.

    Dicts and references are changed in place.
    """
    if isinstance(node, FieldReference):  # in a list; `assign` handles those in dicts
        new = _set_value(None if node.empty() else node.get(), parts, value, path)
        node.set(to_config_dict(new) if isinstance(new, dict) else new, type_safe=False)
        return node
    if not parts:
        if is_level(node) and isinstance(value, dict) and not replaces(value):
            merge_into(node, value)
            return node
        return remove_delete_keys(value)
    if node is None and isinstance(parts[0], str):
        node = {}
    place = f"`{path}`" if path else "the config"
    if is_level(node):
        key, rest = _match_key(node, parts)
        if isinstance(key, int) and key not in node:
            raise ConfigError(f"{place} must be a list, got a dict")
        inner = f"{path}.{key}" if path else str(key)
        old = get_value(node, key)
        if old is None and rest and isinstance(rest[0], int):
            raise ConfigError(f"there is no list `{inner}`{closest(str(key), map(str, node))}")
        new = _set_value(old, rest, value, inner)
        if new is not old or not is_level(old):
            assign(node, key, new)
        return node
    if type(node) not in (list, tuple):
        raise ConfigError(f"{place} must be a dict or a list, got {node!r}")
    items = list(node)
    try:
        index = range(len(items))[int(parts[0])]
    except (IndexError, ValueError):
        raise ConfigError(
            f"an index of {place} must be an integer below {len(items)}, got {parts[0]}"
        ) from None
    items[index] = _set_value(items[index], parts[1:], value, f"{path}[{index}]")
    return type(node)(items)


def _match_key(node: ConfigLike, parts: list[str | int]) -> tuple[str | int, list[str | int]]:
    """Split `parts` into a key in `node` and the remaining parts.

    Existing keys with dots take precedence.
    """
    names = list(itertools.takewhile(lambda part: isinstance(part, str), parts))
    # Keys of plain dicts may have dots (custom_keys): the longest that exists is meant.
    for count in range(len(names), 1, -1):
        if (key := ".".join(map(str, names[:count]))) in node:
            return key, parts[count:]
    return parts[0], parts[1:]
