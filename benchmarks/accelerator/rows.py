"""Rows of the suite's table, appended to a file of JSON lines as soon as they are known."""

import json
import os
import time
from typing import Any

FILE = "JENGINE_ACCELERATOR_ROWS"  # environment variable: the file that the parts append to


def record(check: str, value: Any, wanted: str = "", passed: bool | None = None) -> None:
    """Append a row to the file and print it.

    Args:
      check: what was checked or measured, with its unit.
      value: a number or a short text.
      wanted: the bound that the value must meet, as text; empty for a measurement.
      passed: whether it met the bound; None for a measurement.
    """
    part = os.environ.get("JENGINE_ACCELERATOR_PART", "")
    append(dict(part=part, check=check, value=value, wanted=wanted, passed=passed))


def record_close(check: str, difference: float, bound: float) -> None:
    """Record a difference that must be at most `bound`."""
    record(check, float(difference), f"<= {bound:g}", bool(difference <= bound))


def append(row: dict[str, Any]) -> None:
    """Append a row, with the time at which it was known, and flush it to the disk."""
    row = {**row, "time": round(time.time(), 1)}
    mark = {None: "", True: "ok", False: "FAILED"}[row["passed"]]
    print(
        f"[{row['part']}] {row['check']}: {format_value(row['value'])} {row['wanted']} {mark}",
        flush=True,
    )
    if path := os.environ.get(FILE):
        with open(path, "a") as file:
            file.write(json.dumps(row) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read(path: str) -> list[dict[str, Any]]:
    """Read the rows of a file; a line that a killed process left incomplete is left out."""
    rows = []
    with open(path) as file:
        for line in file:
            if line.endswith("\n"):
                rows.append(json.loads(line))
    return rows


def format_value(value: Any) -> str:
    """Format a value for the table."""
    return f"{value:.4g}" if isinstance(value, float) else str(value)
