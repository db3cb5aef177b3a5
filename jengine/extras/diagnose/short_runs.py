"""What commands share that look at a run without leaving one, and `jengine groups`."""

import argparse
import contextlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from jengine.cli.commands import load
from jengine.config.errors import ConfigError, require_extra

if TYPE_CHECKING:
    # imported when a command needs one, since it takes a second
    from jengine.runner.runner import Runner


@contextlib.contextmanager
def temporary_runner(cfg: Mapping[str, Any]) -> "Iterator[Runner]":
    """Build a Runner in a temporary directory, so that the command leaves no files behind, and
    logs only warnings.
    """
    from jengine.runner.runner import Runner

    with tempfile.TemporaryDirectory() as work_dir:
        yield Runner.from_cfg(
            {**cfg, "work_dir": work_dir, "log_level": "WARNING", "resume": False}
        )


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
    from jengine.runner.session import format_groups

    with temporary_runner(load(args, overrides)) as runner:
        if not runner.is_training_configured:
            raise ConfigError("there are no parameter groups: the config has no optim_wrapper")
        print(format_groups(*runner.build_optimizer().group_table()))
