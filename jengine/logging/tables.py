"""Format plain-text tables for log lines and reports."""

import io
import numbers
from collections.abc import Iterable, Sequence
from typing import Any, Literal

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

Align = Literal["left", "center", "right"]

_WIDE = 100_000  # a table takes the width that its cells need; a log file has no margin


def format_table(
    columns: Sequence[str],
    rows: Iterable[Sequence[Any]],
    title: str | None = None,
    align: Sequence[Align] | None = None,
) -> str:
    """Format rows as a table of plain ASCII, without colours and without wrapping.

    Integers get thousands separators, floats six significant digits, None an empty cell.

    Args:
      columns: the headings.
      rows: the cells; each row as long as `columns`.
      title: a line above the table.
      align: one of 'left', 'center', 'right' for each column; by default columns of numbers go right, others left.

    Returns:
      The lines, joined, without a newline at the end.

    Raises:
      ValueError: a row or `align` of another length than `columns`.
    """
    cells = [list(row) for row in rows]
    for index, row in enumerate(cells):
        if len(row) != len(columns):
            raise ValueError(f"row {index} has {len(row)} cells, the table has {len(columns)} columns: {row!r}")
    if align is None:
        align = [_natural_alignment([row[i] for row in cells]) for i in range(len(columns))]
    elif len(align) != len(columns):
        raise ValueError(f"align must have an entry for each of the {len(columns)} columns, got {len(align)}")
    table = Table(box=box.ASCII2)
    for heading, side in zip(columns, align, strict=True):
        table.add_column(Text(heading), justify=side, no_wrap=True)
    for row in cells:
        table.add_row(*(Text(_cell(value)) for value in row))
    out = io.StringIO()
    Console(file=out, width=_WIDE, color_system=None, force_terminal=False).print(table)
    lines = [line.rstrip() for line in out.getvalue().splitlines()]
    return "\n".join(lines if title is None else [title, *lines])


def _natural_alignment(cells: Sequence[Any]) -> Align:
    filled = [cell for cell in cells if cell is not None]
    return "right" if filled and all(_is_number(cell) for cell in filled) else "left"


def _is_number(cell: Any) -> bool:
    return isinstance(cell, numbers.Real) and not isinstance(cell, bool)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if not _is_number(value):
        return str(value)
    return f"{value:,}" if isinstance(value, numbers.Integral) else f"{float(value):.6g}"
