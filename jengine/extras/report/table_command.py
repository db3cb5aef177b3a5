"""The command `jengine table`."""

import argparse
import sys
from collections.abc import Sequence

from jengine.config.errors import ConfigError
from jengine.extras.report.figures import plot_metric
from jengine.extras.report.run_files import read_runs
from jengine.extras.report.run_table import build_table
from jengine.extras.report.table_format import format_cells, sort_cells
from jengine.logging.console import escape_control, write_line


def print_table(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print runs with the hyperparameters that differ and their metrics, and draw one of these."""
    if args.metric and not args.plot:
        raise ConfigError("`--metric` must come with `--plot FILE`, got it alone")
    runs = read_runs(args.work_dirs)
    found = build_table(runs)
    notes = [*found.notes]
    if args.plot:
        notes.append(plot_metric(args.plot, runs, found, args.metric))
    headings, rows = found.cells(args.group)
    if args.sort:
        sort_cells(headings, rows, args.sort, args.reverse)
    elif args.reverse:
        rows.reverse()
    write_line(format_cells(headings, rows, args.style))
    for note in notes:
        print(escape_control(note), file=sys.stderr)
