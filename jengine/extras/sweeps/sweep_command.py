"""`jengine sweep`: many runs of one config."""

import argparse
import os
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from jengine.cli.commands import config_name
from jengine.config.errors import ConfigError
from jengine.config.overrides import parse_value
from jengine.extras.sweeps.run import SweepInterrupted, sweep
from jengine.extras.sweeps.space import parse_grid, parse_ranges
from jengine.extras.sweeps.trials import relative
from jengine.logging.console import write_line


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Run a sweep and print its table; the exit code is 1 if a run failed."""
    directory = args.work_dir or os.path.join("work_dirs", f"{config_name(args)}_sweep")
    try:
        table = sweep(
            args.config,
            grid=parse_grid(args.grid),
            ranges=parse_ranges(args.range),
            random=args.random,
            search=args.search,
            seeds=args.seeds,
            jobs=args.jobs,
            work_dir=directory,
            metric=args.metric,
            overrides=[text.removeprefix("--config.") for text in overrides],
            launcher=args.sweep_launcher,
            launcher_options=_parse_options(args.launcher_option),
            max_time=args.max_time,
        )
    except SweepInterrupted as error:
        command = shlex.join(["jengine", *args.argv])
        print(f"jengine: interrupted: {error}; to continue: {command}", file=sys.stderr)
        return 130
    write_line(table.format(group=args.seeds > 1))
    print(f"all runs: jengine table {relative(directory)}")
    # By the error: the work dir of a failed run may belong to a process that still trains.
    failed = [row for row in table.rows if row.error and row.status != "finished"]
    for row in failed:
        print(f"{row.name} failed: {row.error}", file=sys.stderr)
    return 1 if failed else 0


def _parse_options(arguments: Sequence[str]) -> dict[str, Any]:
    options = {}
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if not (name and equals and text):
            raise ConfigError(f"`--launcher-option` must be NAME=VALUE, got {argument!r}")
        options[name] = parse_value(text)
    return options
