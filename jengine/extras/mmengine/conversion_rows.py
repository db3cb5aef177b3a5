"""Rows of a conversion: what happened to each value of the original config."""

import collections
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Literal, NamedTuple

Status = Literal["taken over", "changed", "dropped", "to be done"]

_INDEX = re.compile(r"\[\d+\]")
_OWN = re.compile(r"my_(data|metrics|model)\.")  # before the name of a class that the user writes


class Row(NamedTuple):
    """What happened to a key in the original config."""

    status: Status
    path: str
    text: str
    is_whole: bool = False  # whether it says what happened to everything below the path


def list_lost(
    original: Mapping[str, Any],
    result: Mapping[str, Any],
    rows: Iterable[Row],
    moved: Mapping[str, str],
) -> list[Row]:
    """Return rows for the values that are neither in the result nor in a row.

    So no value is lost without a line, whatever the converter knows about it.

    >>> rows = [Row("changed", "a.type", "", True)]
    >>> list_lost({"a": {"type": "A", "x": 1, "y": 2}}, {"a": {"y": 2}}, rows, {})
    [Row(status='dropped', path='a', text='x=1: no counterpart here', is_whole=True)]

    Args:
      original: the config that was converted.
      result: the new config.
      rows: what is known to have happened.
      moved: the new path for each old one below which the result has the values.
    """
    told = [row.path for row in rows if row.is_whole]
    # Entries of lists may have moved up, so they are compared without their indices.
    kept = collections.Counter(
        (_INDEX.sub("[]", path), _OWN.sub("", repr(value)))
        for path, _, value in _leaves(result, "", "")
    )
    lost: dict[str, dict[str, Any]] = {}
    for path, owner, value in _leaves(original, "", ""):
        if path.endswith("_scope_") or any(_is_below(path, other) for other in told):
            continue
        old = max((other for other in moved if _is_below(path, other)), key=len, default="")
        place = _INDEX.sub("[]", moved[old] + path[len(old) :] if old else path)
        if kept[place, repr(value)]:
            kept[place, repr(value)] -= 1
        else:
            lost.setdefault(owner or path, {})[path[len(owner) :].lstrip(".")] = value
    return [
        Row("to be done", path, f"for your module: {describe(values)}", True)
        if _is_below(path, "model")
        else Row("dropped", path, f"{describe(values)}: no counterpart here", True)
        for path, values in lost.items()
    ]


def describe(value: Any) -> str:
    """Return a config as the call that it stands for.

    >>> describe({"type": "ResNet", "depth": 50})
    'ResNet(depth=50)'
    """
    if isinstance(value, list | tuple) and any(isinstance(item, Mapping) for item in value):
        return f"[{', '.join(map(describe, value))}]"
    if not isinstance(value, Mapping):
        return repr(value)
    arguments = ", ".join(f"{key}={describe(item)}" for key, item in value.items() if key != "type")
    return f"{value['type']}({arguments})" if "type" in value else arguments or "{}"


def _leaves(value: Any, path: str, owner: str) -> Iterator[tuple[str, str, Any]]:
    """Yield each value without parts, with its path and the path of the dict or list around it.

    A list with plain values is one value.
    """
    if isinstance(value, Mapping) and value:
        for key, item in value.items():
            yield from _leaves(item, f"{path}.{key}" if path else str(key), path)
    elif isinstance(value, list | tuple) and any(
        isinstance(item, Mapping | list | tuple) for item in value
    ):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{path}[{index}]", path)
    else:
        yield path, owner, value


def _is_below(path: str, other: str) -> bool:
    return path == other or path.startswith((f"{other}.", f"{other}["))
