"""The place of a setting that a config has one or more levels deeper than where it was set."""

import re
from collections.abc import Iterator, Mapping
from typing import Any

from jengine.config.annotations import is_mapping

_UNKNOWN = re.compile(r" has no argument '(\w+)'")


def name_deeper_setting(error: BaseException, context: Mapping[str, Any]) -> str | None:
    """Return where the config has a setting, for an unknown argument above that place.

    Explainer.
    """
    match = _UNKNOWN.search(str(error)) if isinstance(error, TypeError) else None
    places = [
        note.split("`")[1]
        for note in getattr(error, "__notes__", ())
        if note.startswith("in the config at `")
    ]
    if match is None or not places:
        return None
    node: Any = context.get("cfg") or {}
    for key in places[0].split("."):
        node = node.get(key) if is_mapping(node) else None
    found = [path for path in _find(node, match[1]) if path != match[1]]
    return f"did you mean `{places[0]}.{found[0]}`?" if len(found) == 1 else None


def _find(node: Any, name: str) -> Iterator[str]:
    """Yield the paths below a node, through dicts, that end with a name."""
    for key, value in node.items() if is_mapping(node) else ():
        if key == name:
            yield name
        yield from (f"{key}.{path}" for path in _find(value, name))
