"""The command `jengine diff`: the values that differ between two configs."""

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jengine.checkpoint.layout import find_checkpoint, read_meta
from jengine.config.containers import resolve
from jengine.config.diff import ABSENT, diff_configs
from jengine.config.dump import parse_config
from jengine.config.load import load_config
from jengine.config.overrides import apply_overrides
from jengine.config.storage import read_text
from jengine.logging.console import write_line
from jengine.logging.tables import format_table


def diff(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print a table of the values that differ; overrides apply to the second config."""
    differences = diff_configs(_load_any(args.config), _load_any(args.other, overrides))
    if not differences:
        print("the configs are equal")
        return
    rows = [
        [path, *("" if value is ABSENT else repr(value) for value in pair)]
        for path, pair in differences.items()
    ]
    write_line(format_table(["key", args.config, args.other], rows))


def _load_any(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config in a file, or that of the run in a work dir, or in a checkpoint, without
    running it.
    """
    if not os.path.isdir(path):
        return resolve(load_config(path, overrides))
    file = pathlib.Path(path, "config.py")
    text = (
        read_text(file) if file.is_file() else read_meta(find_checkpoint(path))["meta"].get("cfg")
    )
    return resolve(apply_overrides(parse_config(text), overrides))
