"""Write files of JSON lines that a resumed run continues."""

import json
import math
import os
import pathlib
from collections.abc import Mapping
from typing import Any, TextIO


def open_json_lines(path: str | os.PathLike[str], key: str, start: int) -> TextIO:
    """Open a file to append lines to.

    Args:
      path: the file; its directory is created if necessary.
      key: the entry of each line that holds its iteration.
      start: the iteration at which the run starts. Lines of this and later iterations, which the run will write again,
        are removed, as well as incomplete lines.

    Returns:
      The file, open at its end.
    """
    file = pathlib.Path(path)
    file.parent.mkdir(parents=True, exist_ok=True)
    kept = []
    if start > 0 and file.exists():
        for line in file.read_text(encoding="utf-8").splitlines():
            try:
                iteration = json.loads(line).get(key, 0)
            except json.JSONDecodeError:
                continue
            if iteration < start:
                kept.append(f"{line}\n")
    temporary = file.with_name(f"{file.name}.new")
    temporary.write_text("".join(kept), encoding="utf-8")
    temporary.replace(file)
    return file.open("a", encoding="utf-8")


def write_json_line(file: TextIO, values: Mapping[str, Any]) -> None:
    """Append a JSON object with sorted keys, and flush it to the disk.

    JSON has no NaN and no infinity: they become strings that `float()` can parse.
    """
    plain = {
        name: str(value) if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }
    file.write(json.dumps(plain, sort_keys=True, allow_nan=False) + "\n")
    file.flush()
    os.fsync(file.fileno())
