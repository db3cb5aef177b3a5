"""Tables as text, CSV, Markdown and LaTeX, and sorted by a column."""

import csv
import io
import math
import statistics
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeAlias

from jengine.config.errors import ConfigError, closest
from jengine.logging.console import escape_name
from jengine.logging.tables import format_table

_LATEX = {char: f"\\{char}" for char in "&%$#_{}"} | {
    "\\": r"\textbackslash{}",
    "^": r"\^{}",
    "~": r"\~{}",
    "±": r"$\pm$",
}


class Spread(NamedTuple):
    """Mean and sample standard deviation of a metric over a number of seeds."""

    mean: float
    std: float  # 0 for one seed
    seeds: int

    def __str__(self) -> str:
        return f"{self.mean:.6g} ± {self.std:.2g}" if self.seeds > 1 else f"{self.mean:.6g}"


def count(number: int, noun: str) -> str:
    """Return a number with its noun.

    >>> count(1, "run"), count(2, "run")
    ('1 run', '2 runs')
    """
    return f"{number} {noun}{'' if number == 1 else 's'}"


Cell: TypeAlias = "str | int | float | Spread | None"


def spread(values: Sequence[float]) -> Spread:
    """Return mean and sample standard deviation of one or more values.

    Both NaN if one is not finite.

    >>> spread([1.0, 2.0, 3.0])
    Spread(mean=2.0, std=1.0, seeds=3)
    """
    if not all(map(math.isfinite, values)):
        return Spread(math.nan, math.nan, len(values))
    return Spread(
        statistics.fmean(values), statistics.stdev(values) if len(values) > 1 else 0.0, len(values)
    )


def sort_cells(
    headings: Sequence[str], rows: list[list[Cell]], name: str, reverse: bool = False
) -> None:
    """Sort rows by a column; empty cells and NaN come last.

    Raises:
      ConfigError: there is no such column.
    """
    if name not in headings:
        raise ConfigError(
            f"`--sort` must be one of {', '.join(headings)}, got {name!r}{closest(name, headings)}"
        )
    column = headings.index(name)
    keys = [_sort_key(row[column]) for row in rows]
    empty = [row for row, key in zip(rows, keys, strict=True) if key is None]
    filled = [(key, row) for row, key in zip(rows, keys, strict=True) if key is not None]
    filled.sort(key=lambda pair: pair[0], reverse=reverse)
    rows[:] = [*(row for _, row in filled), *empty]


def format_cells(
    headings: Sequence[str], rows: Sequence[Sequence[Cell]], style: str = "text"
) -> str:
    r"""Return a table as 'text', 'csv', 'markdown' or 'latex' (which requires the package
    booktabs).

    >>> print(format_cells(["lr", "best acc"], [[0.1, Spread(0.5, 0.02, 4)]], style="latex"))
    \begin{tabular}{rr}
    \toprule
    lr & best acc \\
    \midrule
    0.1 & 0.5 $\pm$ 0.02 \\
    \bottomrule
    \end{tabular}
    """
    if style == "csv":
        return _format_csv(headings, rows)
    rows = [[escape_name(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    filled = [[row[i] for row in rows if row[i] is not None] for i in range(len(headings))]
    is_right = [
        bool(cells) and not any(isinstance(cell, str) for cell in cells) for cells in filled
    ]
    if style == "text":
        text = [[str(cell) if isinstance(cell, Spread) else cell for cell in row] for row in rows]
        return format_table(
            list(headings), text, align=["right" if right else "left" for right in is_right]
        )
    table = [list(headings), *([_format_cell(cell) for cell in row] for row in rows)]
    if style == "markdown":
        table = [[cell.replace("|", "\\|") for cell in row] for row in table]
        lines = [f"| {' | '.join(row)} |" for row in table]
        return "\n".join(
            [lines[0], f"|{'|'.join('--:' if right else '---' for right in is_right)}|", *lines[1:]]
        )
    table = [["".join(_LATEX.get(char, char) for char in cell) for cell in row] for row in table]
    lines = [f"{' & '.join(row)} \\\\" for row in table]
    sides = "".join("r" if right else "l" for right in is_right)
    begin = f"\\begin{{tabular}}{{{sides}}}\n\\toprule"
    end = "\\bottomrule\n\\end{tabular}"
    return "\n".join([begin, lines[0], "\\midrule", *lines[1:], end])


def _format_csv(headings: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    """Return the exact values, with the parts of a spread in three columns."""
    is_spread = [any(isinstance(row[i], Spread) for row in rows) for i in range(len(headings))]
    columns = []
    for heading, spread in zip(headings, is_spread, strict=True):
        columns += [f"{heading} {field}" for field in Spread._fields] if spread else [heading]
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(columns)
    for row in rows:
        cells: list[Any] = []
        for cell, spread in zip(row, is_spread, strict=True):
            cells += (
                [*(cell if isinstance(cell, Spread) else (None, None, None))] if spread else [cell]
            )
        writer.writerow(cells)
    return out.getvalue().rstrip("\n")


def _format_cell(cell: Cell) -> str:
    if cell is None:
        return ""
    return f"{cell:.6g}" if isinstance(cell, float) else str(cell)


def _sort_key(cell: Cell) -> tuple[bool, float, str] | None:
    """Return a key by which numbers come before texts; None for what has no place in an order."""
    number = cell.mean if isinstance(cell, Spread) else cell
    if isinstance(number, int | float):
        return None if math.isnan(number) else (False, number, "")
    return None if cell is None else (True, 0.0, str(cell))
