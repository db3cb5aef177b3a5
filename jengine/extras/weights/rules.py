"""Patterns for dotted paths: a prefix in whole segments, or a regular expression that matches
one.
"""

import functools
import re
from collections.abc import Iterable, Sequence

from jengine.checkpoint.report import list_prefixes
from jengine.config.errors import did_you_mean

# characters that make a pattern a regular expression; a dot does not
_SYNTAX = re.compile(r"[\\^$*+?{}\[\]|()]")


def matches(path: str, *patterns: str) -> bool:
    """Return whether `path` starts with the segments that one of the patterns describes.

    >>> (
    ...     matches("head.fc.bias", "head"),
    ...     matches("header.bias", "head"),
    ...     matches("layers.3.bias", r"layers\\.\\d+"),
    ... )
    (True, False, True)
    """
    return any(compile_pattern(pattern).match(path) for pattern in patterns)


def replace_prefix(path: str, old: str, new: str, match: re.Match[str] | None) -> str:
    """Return the path with `new` in the place of what `match` found.

    In front of it without a match.

    Raises:
      ValueError: `new` has a group that `old` does not have.
    """
    if match is None:
        return ".".join(filter(None, (new, path)))
    try:
        # A plain old name leaves backslashes in the new one as they are; only a pattern has groups
        # to fill in.
        replacement = match.expand(new) if _SYNTAX.search(old) else new
    except (re.error, IndexError) as error:
        raise ValueError(
            f"`rename` must use the groups of the old ones in new names, got {new!r}: {error}"
        ) from None
    return ".".join(filter(None, (replacement, path[match.end() :].removeprefix("."))))


def check_patterns(name: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
    """Raise ValueError if one of the `patterns` for the argument `name` matches none of `paths`."""
    known = tuple(paths)
    for pattern in patterns:
        if not any(matches(path, pattern) for path in known):
            hint = did_you_mean(pattern, {*known, *list_prefixes(known)})
            raise ValueError(
                f"`{name}` must match parameters of the model, got {pattern!r}, which matches "
                f"none{hint}"
            )


@functools.lru_cache(maxsize=1024)  # a pattern is compared with each path of a model
def compile_pattern(pattern: str) -> re.Pattern[str]:
    """Return the regular expression for a prefix of whole segments.

    Raises:
      ValueError: it is no regular expression.
    """
    text = pattern if _SYNTAX.search(pattern) else re.escape(pattern)
    try:
        return re.compile(f"(?:{text})(?=\\.|$)")  # grouped, for `a|b`; ends with a segment
    except re.error as error:
        raise ValueError(
            f"a pattern must be a path or a regular expression, got {pattern!r}: {error}"
        ) from None
