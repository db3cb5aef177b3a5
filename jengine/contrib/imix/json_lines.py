"""Files of JSON lines that a resumed run goes on with."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TextIO


def open_lines(path: str | os.PathLike[str], key: str, start: int) -> TextIO:
    """Opens a file to append lines to.

    Args:
      path: the file; its directory need not exist.
      key: the entry of each line that says which iteration it is of.
      start: the iteration at which the run starts. Lines from there on, which will come again, are removed, and a line
        that was cut off is, too.

    Returns:
      The file, open at its end.
    """
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if start > 0 and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                continue
            if row.get(key, 0) < start:
                kept.append(f"{line}\n")
    fresh = file.with_name(f"{file.name}.new")
    fresh.write_text("".join(kept), encoding="utf-8")
    fresh.replace(file)
    return file.open("a", encoding="utf-8")


def write_line(file: TextIO, row: Mapping[str, Any]) -> None:
    """Appends a JSON object with its keys sorted; it is on the disk when the call returns.

    JSON has no NaN and no infinity: they become strings that `float()` reads.
    """
    plain = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in row.items()
    }
    file.write(json.dumps(plain, sort_keys=True, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
