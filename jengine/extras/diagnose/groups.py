"""Figures of commands, and `jengine groups`."""

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

from jengine.cli.commands import load, temporary_runner
from jengine.config.errors import ConfigError, require_extra
from jengine.logging.console import write_line
from jengine.logging.tables import format_table


@contextlib.contextmanager
def save_figure(path: str, rows: int = 1, **options: Any) -> Iterator[Any]:
    """Draw with matplotlib: yield the axes in `rows`, one below the other, and write them to an
    image file.

    `options` are those of `pyplot.subplots`.
    """
    with require_extra("plot", "--png requires matplotlib"):
        import matplotlib
    # Before pyplot is imported: the default backend opens a window, or fails without a display.
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(rows, 1, squeeze=False, **options)
    yield axes[:, 0]
    figure.tight_layout()
    figure.savefig(path)
    # pyplot keeps every figure until it is closed.
    pyplot.close(figure)


def groups(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the parameter group table."""
    with temporary_runner(load(args, overrides)) as runner:
        if not runner.is_training_configured:
            raise ConfigError("there are no parameter groups: the config has no optim_wrapper")
        columns, rows = runner.build_optimizer().group_table(with_roles=True)
        write_line(format_table(columns, rows, title="Parameter groups"))
