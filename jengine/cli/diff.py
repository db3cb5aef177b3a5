"""`jengine diff`: the values that differ between two configs."""

import argparse
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from jengine.config import diff_configs, load_config, parse_config, resolve
from jengine.config.diff import ABSENT
from jengine.logging import format_table


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print a table of the values that differ; overrides apply to the second config."""
    differences = diff_configs(_load(args.config), _load(args.other, overrides))
    if not differences:
        print("the configs are equal")
        return
    rows = [[path, *("" if value is ABSENT else repr(value) for value in pair)] for path, pair in differences.items()]
    print(format_table(["key", args.config, args.other], rows))


def _load(path: str, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the config in a file, or that of the run in a work dir, or in a checkpoint, without running it."""
    if not os.path.isdir(path):
        return resolve(load_config(path, overrides))
    from jengine.checkpoint import find_checkpoint, read_meta
    from jengine.config import apply_overrides

    file = pathlib.Path(path, "config.py")
    text = file.read_text(encoding="utf-8") if file.is_file() else read_meta(find_checkpoint(path))["meta"].get("cfg")
    return resolve(apply_overrides(parse_config(text), overrides))
