"""Rules that select parameters: regular expressions, searched in dotted paths and torch aliases."""

import re
from collections.abc import Sequence

from jengine.config import paths
from jengine.config.errors import ConfigError

Rule = re.Pattern[str]


def compile_rule(pattern: str, owner: str) -> Rule:
    """Return the rule; raise ConfigError, with the class `owner`, for no regular expression."""
    try:
        return re.compile(pattern)
    except re.error as error:
        raise ConfigError(
            f"{owner}: a rule must be a regular expression, got {pattern!r}: {error}"
        ) from None


def is_match(rule: Rule, path: str) -> bool:
    """Return whether a rule selects the parameter at a path.

    >>> is_match(compile_rule(r"layers\\.1", "LoRA"), "layers_1.kernel")
    True
    """
    return any(rule.search(alias) for alias in paths.path_aliases(path))


def check_match(
    owner: str, argument: str, required: str, rule: Rule, candidates: Sequence[str]
) -> None:
    """Raise ConfigError if a rule in the `argument` of `owner` matches none of the paths.

    `required` says what it must match: 'a parameter'.
    """
    if not any(is_match(rule, path) for path in candidates):
        hint = (
            paths.closest_paths(rule.pattern, candidates)
            or f"; the first are {', '.join(candidates[:5])}"
        )
        raise ConfigError(
            f"{owner}: each rule of `{argument}` must match {required}, got {rule.pattern!r}{hint}"
        )
