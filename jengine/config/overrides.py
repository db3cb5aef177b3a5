"""Values given on the command line: `optim_wrapper.optimizer.lr=0.1`.

The flags of ml_collections cannot replace a whole list, set None, change a type or add a key; these can.
"""

import ast
import re
from collections.abc import Iterable
from typing import Any

from ml_collections import ConfigDict, FieldReference

from jengine.config.containers import assign, config_dict, current, is_mapping
from jengine.config.merge import merge_into, without_delete
from jengine.errors import ConfigError, closest

_PART = re.compile(
    r"""(?:^|\.)(?P<name>[^.\[\]]+) | \[(?P<index>-?\d+)\] | \[(?P<quote>['"])(?P<key>.+?)(?P=quote)\]""", re.X
)
_WORDS = {"true": True, "false": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}


def apply_overrides(cfg: Any, overrides: Iterable[str]) -> ConfigDict:
    """Changes single values of a config.

    An override is `path=value`. A path has dots between keys and brackets around list indices and around keys that
    have dots themselves: `custom_hooks[0].interval`, `custom_keys['backbone.layer0'].lr_mult`. A leading `--config.`
    or `config.` is dropped. The value is a Python literal, or a bare word, which is a string (`true`, `false`, `inf`
    and `nan` are not). A dict merges with the dict that is there, `_delete_=True` included; everything else takes
    the place of the old value, whatever its type. Keys that do not exist are added: whoever builds from the
    config checks its arguments.

    Args:
      cfg: a dict or a ConfigDict; it is left as it was.
      overrides: applied in their order.

    Returns:
      A new ConfigDict.

    Raises:
      ConfigError: an override that cannot be read, that goes through a value which is no dict or list, or an index
        that a list does not have.
    """
    if isinstance(overrides, str):
        raise TypeError(f"overrides are a list of strings, found one string: {overrides!r}")
    result = config_dict(cfg)
    for override in overrides:
        path, equals, text = override.partition("=")
        path = path.strip()
        path = path.removeprefix("--config.") if "config" in result else re.sub(r"^(--)?config\.", "", path)
        if not equals or not path:
            raise ConfigError(f"override {override!r} is not of the form key.key=value")
        if not text.strip():
            raise ConfigError(f"override {override!r} has no value; an empty string is written {path}=''")
        try:
            _replaced(result, _split(path), _parse(text.strip()), "")
        except (ConfigError, TypeError) as error:
            raise ConfigError(f"override {override!r}: {error}") from None
    return result


def _split(path: str) -> list[str | int]:
    parts: list[str | int] = []
    position = 0
    while position < len(path):
        match = _PART.match(path, position)
        if match is None:
            raise ConfigError(
                f"cannot read {path[position:]!r} of the key; write it like hooks[0].interval or a['b.c'].d"
            )
        index = match["index"]
        parts.append(int(index) if index is not None else match["name"] or match["key"])
        position = match.end()
    return parts


def _parse(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        if text[0] in "[({'\"":
            raise ConfigError(
                f"{text} is no Python literal; strings inside brackets are quoted, and a string that begins "
                "with a bracket or a quote is quoted as a whole"
            ) from None
        return text


def _replaced(node: Any, parts: list[str | int], value: Any, done: str) -> Any:
    """What stands at `done` once `value` is set below it: `node` itself, changed, where it can be changed."""
    if isinstance(node, FieldReference):  # in a list; `assign` looks after those of dicts
        new = _replaced(None if node.empty() else node.get(), parts, value, done)
        node.set(config_dict(new) if isinstance(new, dict) else new, type_safe=False)
        return node
    if not parts:
        if is_mapping(node) and isinstance(value, dict) and not value.get("_delete_"):
            merge_into(node, value)
            return node
        return without_delete(value)
    part = parts[0]
    if node is None and isinstance(part, str):
        node = {}
    if is_mapping(node):
        key, rest = _key_of(node, parts)
        if isinstance(key, int) and key not in node:
            raise ConfigError(f"{_shown(done)} is a dict, not a list{closest(str(key), map(str, node))}")
        old = current(node, key)
        if rest and isinstance(rest[0], int) and old is None:
            raise ConfigError(f"there is no list `{_join(done, key)}`{closest(str(key), map(str, node))}")
        if rest and not (old is None or is_mapping(old) or type(old) in (list, tuple)):
            siblings = closest(str(rest[0]), map(str, node))
            raise ConfigError(f"`{_join(done, key)}` is {old!r}, not a dict or a list{siblings}")
        new = _replaced(old, rest, value, _join(done, key))
        if new is not old or not is_mapping(old):
            assign(node, key, new)
        return node
    if type(node) in (list, tuple):
        index = _index_of(node, part, done)
        items = list(node)
        items[index] = _replaced(items[index], parts[1:], value, _join(done, index))
        return type(node)(items)
    raise ConfigError(f"{_shown(done)} is {node!r}, not a dict or a list")


def _key_of(node: Any, parts: list[str | int]) -> tuple[str | int, list[str | int]]:
    """The key of `node` that `parts` begin with, and the parts after it; existing keys with dots come first."""
    names = []
    for part in parts:
        if not isinstance(part, str):
            break
        names.append(part)
    for count in range(len(names), 1, -1):
        if (key := ".".join(names[:count])) in node:
            return key, parts[count:]
    return parts[0], parts[1:]


def _index_of(node: Any, part: str | int, done: str) -> int:
    if isinstance(part, str) and not re.fullmatch(r"-?\d+", part):
        raise ConfigError(f"{_shown(done)} is a list of {len(node)}; write {done}[0].{part} for its first item")
    index = int(part)
    if not -len(node) <= index < len(node):
        raise ConfigError(f"{_shown(done)} has {len(node)} item{'s' * (len(node) != 1)}, there is no [{index}]")
    return index


def _join(done: str, part: str | int) -> str:
    if isinstance(part, int):
        return f"{done}[{part}]"
    return f"{done}.{part}" if done else part


def _shown(done: str) -> str:
    return f"`{done}`" if done else "the config"
