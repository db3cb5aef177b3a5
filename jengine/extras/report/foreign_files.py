"""Run files that may be from anyone: nothing outside the run directory is read, and they may
contain anything.
"""

import os
import pathlib
from collections.abc import Mapping
from typing import Any

from jengine.config.json_codec import decode_object
from jengine.config.storage import UnsafeFileError, read_bytes

_MAX_INTEGER = 2**64
_MAX_FLOAT = 1e300  # sums of a few stay finite


class ForeignFiles:
    """Reader for the files below a directory; what cannot be read is noted in one line.

    Args:
      root: the directory; links that lead out of it are not followed.

    Attributes:
      notes: what could not be read, and why.
    """

    def __init__(self, root: pathlib.Path) -> None:
        self.root = root
        self.notes: list[str] = []

    def note(self, path: pathlib.Path, reason: object) -> None:
        """Note that a file or directory cannot be read."""
        name = path.relative_to(self.root) if path.is_relative_to(self.root) else path
        self.notes.append(f"{name} cannot be read: {' '.join(str(reason).split())[:200]}")

    def find(self, path: pathlib.Path) -> bool:
        """Return whether a path exists within the directory; one that leads out of it is noted."""
        try:
            if not os.path.lexists(path):
                return False
            if pathlib.Path(os.path.realpath(path, strict=True)).is_relative_to(
                os.path.realpath(self.root)
            ):
                return True
        except (OSError, ValueError) as error:  # a loop of links, a null character
            self.note(path, error)
            return False
        self.note(path, f"it leads out of {self.root}")
        return False

    def read(self, path: pathlib.Path) -> bytes | None:
        """Return the contents of a file.

        None if it does not exist or cannot be read, which is noted.
        """
        if not self.find(path):
            return None
        try:
            return read_bytes(path)
        except (OSError, UnsafeFileError) as error:
            self.note(path, error.strerror or error)
            return None

    def read_text(self, path: pathlib.Path) -> str | None:
        """Return a file as text, with bytes other than UTF-8 replaced."""
        content = self.read(path)
        return None if content is None else content.decode("utf-8", errors="replace")

    def read_json(self, path: pathlib.Path) -> dict[str, Any]:
        """Return the object in a file; {} if it does not exist or cannot be read."""
        text = self.read_text(path)
        if text is None:
            return {}
        try:
            return decode_object(text)
        except ValueError as error:
            # It may be of any age or origin, or half written by a run that trains: the page says so
            # and goes on.
            self.note(path, error)
            return {}


def is_number(value: Any) -> bool:
    """Return whether a value is a finite number that is not too large for a page.

    >>> is_number(1.5), is_number(float("nan")), is_number(True)
    (True, False, False)
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return abs(value) <= (_MAX_INTEGER if isinstance(value, int) else _MAX_FLOAT)


def conform(value: Any, schema: Any, path: str, problems: list[str]) -> Any:
    """Return the parts of a JSON value that match a schema.

    The paths of others are added to `problems`.

    >>> problems = []
    >>> (
    ...     conform({"name": "a", "size": "large"}, {"name": str, "size": float}, "run", problems),
    ...     problems,
    ... )
    ({'name': 'a'}, ['run.size'])

    A schema is `str` or `float` for any text or number; `[schema]`, whose elements all must
    conform; `{str: schema}`; or a dict of optional entries.
    """
    if isinstance(schema, dict) and isinstance(value, dict):
        schemas = {name: schema.get(name, schema.get(str)) for name in value}
        found = {
            name: conform(item, schemas[name], f"{path}.{name}", problems)
            for name, item in value.items()
            if schemas[name] is not None and item is not None
        }
        return {name: item for name, item in found.items() if item is not None}
    if isinstance(schema, list) and isinstance(value, list):
        items = [conform(item, schema[0], f"{path}[{i}]", problems) for i, item in enumerate(value)]
        return None if any(item is None for item in items) else items
    if (schema is str and isinstance(value, str)) or (schema is float and is_number(value)):
        return value
    # Dropped with a note rather than shown: what the page draws must have the types that it
    # expects.
    problems.append(path)
    return None


def get_dict(value: Any, *keys: str) -> Mapping[str, Any]:
    """Return the dict at nested keys; {} if there is none."""
    for key in keys:
        value = value.get(key) if isinstance(value, Mapping) else None
    return value if isinstance(value, Mapping) else {}
