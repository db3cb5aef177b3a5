"""`jengine convert`: an MMEngine project's config, written as one for jengine."""

import argparse
import pathlib
import sys
import textwrap
import types
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jengine.config import description
from jengine.config.containers import iter_nodes, resolve
from jengine.config.dump import WIDTH, Writer
from jengine.config.errors import ConfigError
from jengine.config.plugins import load_each
from jengine.extras.mmengine.conversion import Conversion
from jengine.extras.mmengine.conversion_rows import Row, describe, list_lost
from jengine.extras.mmengine.flat import load_flat
from jengine.logging.console import write_line
from jengine.logging.tables import format_table

_OLD_MARKS = ("data", "runner", "lr_config", "optimizer_config")
_WIDTH = 70  # columns of the text in the table
_ORDER = ("taken over", "changed", "dropped", "to be done")


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Convert a config, and print what happened to each key as a table."""
    path = pathlib.Path(args.mmengine_config)
    if not path.is_file():
        raise FileNotFoundError(f"the config file {str(path)!r} does not exist")
    # The file is meant to be edited by hand afterwards: a second conversion must not undo that.
    if args.out and pathlib.Path(args.out).exists():
        raise ConfigError(f"`--out` must be a new file, got {args.out!r}, which exists")
    text, table = _convert_file(path)
    if args.out:
        pathlib.Path(args.out).write_text(text, encoding="utf-8")
        write_line(table)
        print(f"wrote {args.out}; search it for TODO")
    else:
        print(text, end="")
        print(table, file=sys.stderr)


def _convert_file(path: pathlib.Path) -> tuple[str, str]:
    """Return the text of the new config file, and a table of what happened and what a person
    must do.
    """
    path = path.resolve()  # base files are relative to the file itself, not to a link to it
    flat = load_flat(path, types.ModuleType("_jengine_converted"))
    cfg = resolve(flat.values)
    calls = (convert(cfg) for convert in load_each("config_converters"))
    found = next(filter(None, calls), None)
    if found is not None:
        body, rows = _describe_call(cfg, *found)
    elif any(mark in cfg for mark in _OLD_MARKS) and "train_dataloader" not in cfg:
        raise ConfigError(
            f"{str(path)!r} must be a config of MMEngine (train_dataloader, optim_wrapper, ...) or "
            "of a code base whose extra converts it, got the older form of MMCV 1.x"
        )
    else:
        conversion = Conversion(cfg, flat.read)
        body = _format(conversion.result, conversion.todo, "{}")
        rows = conversion.rows
    lines: list[tuple[str, str, str]] = []
    for row in sorted(rows, key=lambda row: _ORDER.index(row.status)):
        first, *others = textwrap.wrap(row.text, _WIDTH) or [""]
        lines += [(row.status, row.path, first), *(("", "", other) for other in others)]
    return f'"""Converted from {path.name} by `jengine convert`."""\n{body}', format_table(
        ("", "key", "what"), lines
    )


def _describe_call(
    cfg: Mapping[str, Any],
    function: Callable[..., Any],
    argument: Mapping[str, Any],
    todo: Mapping[str, Sequence[str]],
    moved: Mapping[str, str],
) -> tuple[str, list[Row]]:
    """Return the code of a config that calls a function, and the table rows."""
    name = function.__name__
    rows = [
        Row("taken over", key, "")
        for key, value in argument.items()
        if key in cfg and cfg[key] == value
    ]
    rows += [
        Row("dropped", key, f"not a key of `{name}`, {describe(cfg[key])}", is_whole=True)
        for key in cfg
        if key not in argument and key not in todo
    ]
    rows += [
        Row("to be done", key, text, is_whole=key not in argument)
        for key, texts in todo.items()
        for text in texts
    ]
    rows += list_lost(cfg, argument, rows, moved)
    body = _format(argument, todo, f"{name}(\n        {{}}\n    )")
    package = function.__module__.rpartition(".")[0]
    return f"\nfrom {package} import {name}\n{body}", rows


def _format(cfg: Mapping[str, Any], todo: Mapping[str, Sequence[str]], call: str) -> str:
    """Return the code of `get_config()`, with comments above the keys that a person must
    complete.
    """
    paths = {path for path, _ in iter_nodes(cfg)}
    absent = [
        f"    # TODO {path}: {text}\n"
        for path, texts in todo.items()
        if path not in paths
        for text in texts
    ]
    indent = 4 if call == "{}" else 8

    def comment(path: str, indent: int) -> str:
        margin = " " * indent
        lines = []
        for text in todo.get(path, ()):
            first, *others = textwrap.wrap(text, WIDTH - indent)
            lines += [f"# TODO: {first}", *(f"#   {other}" for other in others)]
        return "".join(f"{line}\n{margin}" for line in lines)

    literal = Writer(comment).literal(description.describe(resolve(cfg)), indent, path="")
    return f"\n\ndef get_config() -> dict:\n{''.join(absent)}    return {call.format(literal)}\n"
