"""Patterns for dotted paths: a prefix in whole segments, or a regular expression that matches one."""

import functools
import re
from collections.abc import Iterable, Sequence

from jengine.errors import closest, did_you_mean

_SYNTAX = re.compile(r"[\\^$*+?{}\[\]|()]")  # characters that make a pattern a regular expression; a dot does not


def matches(path: str, *patterns: str) -> bool:
    """Return whether `path` starts with the segments that one of the patterns describes.

    >>> matches("head.fc.bias", "head"), matches("header.bias", "head"), matches("layers.3.bias", r"layers\\.\\d+")
    (True, False, True)
    """
    return any(_compile(pattern).match(path) for pattern in patterns)


def rename_paths(paths: Sequence[str], rules: Sequence[tuple[str, str]]) -> dict[str, str]:
    """Return the new path by old path; the first rule that matches a path is applied to it.

    Args:
      paths: dotted paths.
      rules: (old, new) pairs. An empty `old` adds `new` in front, an empty `new` removes the old segments; `new` may
        have groups of a regular expression as `\\\\1`.

    Raises:
      ValueError: a rule matches no path, is no regular expression, or has a group that `old` does not have.

    >>> rename_paths(["encoder.conv.bias"], [("encoder", "backbone")])
    {'encoder.conv.bias': 'backbone.conv.bias'}
    """
    renamed, used = {}, set()
    for path in paths:
        renamed[path] = path
        for old, new in rules:
            if (result := _replace_prefix(path, old, new)) is not None:
                renamed[path] = result
                used.add(old)
                break
    for old, new in rules:
        if old not in used:
            hint = closest(old, list_prefixes(paths))
            raise ValueError(f"`rename` must start with a prefix of a stored path, got ({old!r}, {new!r}){hint}")
    return renamed


def _replace_prefix(path: str, old: str, new: str) -> str | None:
    if not old:
        return ".".join(filter(None, (new, path)))
    match = _compile(old).match(path)
    if match is None:
        return None
    try:
        replacement = match.expand(new) if _SYNTAX.search(old) else new
    except (re.error, IndexError) as error:
        raise ValueError(f"`rename` must use the groups of the old ones in new names, got {new!r}: {error}") from None
    return ".".join(filter(None, (replacement, path[match.end() :].removeprefix("."))))


def check_patterns(name: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Raise ValueError if one of the `patterns` for the argument `name` matches none of `paths`."""
    known = tuple(paths)
    for pattern in patterns:
        if not any(matches(path, pattern) for path in known):
            hint = did_you_mean(pattern, {*known, *list_prefixes(known)})
            raise ValueError(f"`{name}` must match parameters of the model, got {pattern!r}, which matches none{hint}")


def list_prefixes(paths: Iterable[str]) -> set[str]:
    """Return all dotted paths above `paths`: `a` and `a.b` for `a.b.c`."""
    return {path[:i] for path in paths for i, char in enumerate(path) if char == "."}


@functools.lru_cache(maxsize=1024)
def _compile(pattern: str) -> re.Pattern[str]:
    text = pattern if _SYNTAX.search(pattern) else re.escape(pattern)
    try:
        return re.compile(f"(?:{text})(?=\\.|$)")
    except re.error as error:
        raise ValueError(f"a pattern must be a path or a regular expression, got {pattern!r}: {error}") from None
