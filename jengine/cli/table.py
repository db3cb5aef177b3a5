"""`jengine table`: runs in the terminal, with the hyperparameters that differ and their metrics."""

import argparse
import sys
from collections.abc import Sequence

from jengine.logging import escape_control
from jengine.runs.run_table import read_table
from jengine.runs.table_format import format_cells, sort_cells


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the table."""
    table = read_table(args.work_dirs)
    headings, rows = table.cells(args.group)
    if args.sort:
        sort_cells(headings, rows, args.sort, args.reverse)
    elif args.reverse:
        rows.reverse()
    print(format_cells(headings, rows, args.style))
    for note in table.notes:
        print(escape_control(note), file=sys.stderr)
