"""`jengine train`: a training from a config, with a progress line in a terminal."""

import argparse
import functools
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from jengine.cli.commands import build_runner
from jengine.config.plugins import provided

if TYPE_CHECKING:
    from jengine.runner import Runner


def run(args: argparse.Namespace, overrides: Sequence[str]) -> int:
    """Train the model in a config, with a progress line in a terminal."""
    return train(build_runner(args, overrides, resume=args.resume), args.argv)


def train(runner: "Runner", argv: Sequence[str]) -> int:
    """Train, with a progress line in a terminal, and return the exit code.

    Args:
      runner: has not trained yet.
      argv: the arguments of the command line, for the command that continues the run.
    """
    # A message of the engine about how to continue should be a command that the user can paste.
    runner.resume_command = functools.partial(_resume_command, argv)
    if sys.stdout.isatty() and "ProgressHook" in provided("HOOKS"):
        runner.register_hook(dict(type="ProgressHook"))
    try:
        runner.train()
    except KeyboardInterrupt:
        if runner.run.interrupts.signum is None:  # before the first iteration: nothing was logged
            raise
        return 128 + runner.run.interrupts.signum  # as shells report a process that a signal ended
    return 0


def _resume_command(argv: Sequence[str], path: str | None) -> str:
    """Return the command that continues the run with the arguments `argv`.

    See `default_resume_command`.

    >>> _resume_command(["train", "config.py", "--resume"], None)
    'jengine train config.py --resume'
    """
    kept = [
        arg
        for i, arg in enumerate(argv)
        if not arg.startswith("--resume")
        and not (i and argv[i - 1] == "--resume" and not arg.startswith("-"))
    ]
    resume = [] if path == "" else ["--resume", *([path] if path else [])]
    return shlex.join(["jengine", *kept, *resume])
