"""`jengine completion`: the script with which a shell completes commands, options and files."""

import argparse
from collections.abc import Sequence

import shtab

from jengine.cli.parser import build_parser

# How an argument is completed, by the metavar in the help text.
_COMPLETED = {
    **dict.fromkeys(("CONFIG", "CHECKPOINT", "DUMP", "FILE", "PATH"), shtab.FILE),
    **dict.fromkeys(("DIR", "WORK_DIR"), shtab.DIRECTORY),
}


def run(args: argparse.Namespace, overrides: Sequence[str]) -> None:
    """Print the script for a shell."""
    parser = build_parser()
    _complete_paths(parser)
    print(shtab.complete(parser, shell=args.shell), end="")


def _complete_paths(parser: argparse.ArgumentParser) -> None:
    """Mark the arguments that are paths, in a parser and the parsers for its commands."""
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                _complete_paths(command)
        elif action.metavar in _COMPLETED:
            action.complete = _COMPLETED[str(action.metavar)]  # type: ignore[attr-defined]
