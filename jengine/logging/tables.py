"""Plain-text tables for log lines and reports."""

import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich.cells import cell_len

from jengine.config.annotations import is_number
from jengine.logging.console import escape_name

Align = Literal["left", "center", "right"]


def format_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    title: str | None = None,
    align: Sequence[Align] | None = None,
) -> str:
    """Format rows as a plain ASCII table, without colors or wrapping.

    Integers have thousands separators, floats have six significant digits, and None is an empty
    cell.

    Args:
      columns: the headings.
      title: a line above the table.
      align: 'left', 'center' or 'right' for each column; by default numbers are aligned right, all
        else left.

    Examples:
      >>> print(format_table(["phase", "steps"], [["train", 12000], ["val", None]]))
      +-------+--------+
      | phase |  steps |
      +-------+--------+
      | train | 12,000 |
      | val   |        |
      +-------+--------+
    """
    cells = [list(row) for row in rows]
    filled = [[x for x in each[1:] if x is not None] for each in zip(columns, *cells, strict=True)]
    sides: Sequence[Align] = align or [
        "right" if found and all(map(is_number, found)) else "left" for found in filled
    ]
    texts = [list(columns), *([_format_cell(value) for value in row] for row in cells)]
    widths = [max(map(cell_len, column)) for column in zip(*texts, strict=True)]
    header, *body = (
        "".join(f"| {_pad(*cell)} " for cell in zip(row, sides, widths, strict=True)) + "|"
        for row in texts
    )
    rule = "".join("+" + "-" * (width + 2) for width in widths) + "+"
    lines = [rule, header, rule, *body, rule]
    return "\n".join(lines if title is None else [title, *lines])


def shorten_rows(
    rows: Sequence[Sequence[str]], limit: int, kept: Iterable[int] = ()
) -> list[Sequence[str]]:
    """Return at most `limit` rows, besides those with the indices `kept`.

    Of a longer table the first and last ones, with a row at each gap that counts the others.
    """
    if len(rows) <= limit:
        return list(rows)
    tail = len(rows) - (limit - 1) // 2
    shown = sorted({*range(limit // 2), *kept, *range(tail, len(rows))})
    result: list[Sequence[str]] = []
    for previous, index in zip([-1, *shown], shown, strict=False):
        if gap := index - previous - 1:
            result.append([f"… {gap} more …", *[""] * (len(rows[0]) - 1)])
        result.append(rows[index])
    return result


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if not is_number(value):
        return escape_name(str(value))
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{float(value):.6g}"


def _pad(text: str, side: Align, width: int) -> str:
    free = width - cell_len(text)  # a Chinese character has two columns
    before = {"left": 0, "center": free // 2, "right": free}[side]
    return " " * before + text + " " * (free - before)
