"""JSON lines files that a resumed run continues."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TextIO


class JsonLines:
    """Writer for a JSON lines file, which is opened for the first line: a run that is refused does not touch it.

    Args:
      path: the file; its directory is created if necessary.
      key: entry with the iteration in each line.
      start: first iteration of the run. Lines of this and later iterations, which the run will write again, are
        removed, as well as incomplete lines.
    """

    def __init__(self, path: str | os.PathLike[str], key: str, start: int) -> None:
        self._path = pathlib.Path(path)
        self._key = key
        self._start = start
        self._file: TextIO | None = None

    def write(self, values: Mapping[str, Any]) -> None:
        """Append a JSON object with sorted keys, and flush it to the disk."""
        if self._file is None:
            self._file = self._open()
        # JSON has neither NaN nor infinity: they become strings that `float()` can parse.
        plain = {
            name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
            for name, value in values.items()
        }
        self._file.write(json.dumps(plain, sort_keys=True, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self) -> None:
        """Close the file, if it was opened."""
        if self._file is not None:
            self._file.close()

    def _open(self) -> TextIO:
        self._path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if self._start > 0 and self._path.exists():
            for line in self._path.read_text(encoding="utf-8").splitlines():
                try:
                    iteration = json.loads(line).get(self._key, 0)
                except json.JSONDecodeError:
                    continue
                if iteration < self._start:
                    kept.append(f"{line}\n")
        temporary = self._path.with_name(f"{self._path.name}.new")
        temporary.write_text("".join(kept), encoding="utf-8")
        temporary.replace(self._path)
        return self._path.open("a", encoding="utf-8")
