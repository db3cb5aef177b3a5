"""The option `--follow` of `jengine test`; what the command imports is not imported here."""

import argparse
from typing import Any

from jengine.cli.parser import Commands

_SECONDS = 10.0


class _Follow(argparse.Action):
    """Option that replaces the function of the command."""

    def __call__(
        self, parser: object, namespace: argparse.Namespace, values: Any, option: object = None
    ) -> None:
        namespace.follow = values
        namespace.run = "jengine.extras.followers.follow:run"


def add_commands(commands: Commands) -> None:
    """Add the option."""
    text = (
        "evaluate each new checkpoint of the work dir until the run has ended, and look for one "
        f"every so many seconds (default: {_SECONDS:g})"
    )
    commands["test"].add_argument(
        "--follow",
        nargs="?",
        const=_SECONDS,
        type=float,
        metavar="SECONDS",
        action=_Follow,
        help=text,
    )
