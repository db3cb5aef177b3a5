"""Commands and options of `jengine`; what they import when they run is not imported here."""

import argparse
import importlib
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from jengine.config.errors import closest, did_you_mean
from jengine.config.plugins import find_missing, provided

_EPILOG = """Set any value of the config with --config.PATH=VALUE:
  jengine train configs/digits_cnn.py --config.optim_wrapper.optimizer.lr=0.01 \
--config.custom_hooks[0].interval=5
"""
CHECKPOINT = "a checkpoint, or a work dir for its newest one"
_BEST = "the best checkpoint of the work dir, by METRIC if save_best has several"


class _Parser(argparse.ArgumentParser):
    """Parser that suggests a name for a misspelled one."""

    def error(self, message: str) -> NoReturn:
        """Print the message and exit."""
        if match := re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message):
            hint = find_missing(match[1]) or closest(match[1], re.findall(r"[\w-]+", match[2]))
            message = message.partition(" (choose from")[0] + hint
        if match := re.match(r"unknown argument (--[\w-]+)", message):
            message += did_you_mean(match[1], self._option_string_actions)
        if message.endswith("required: CHECKPOINT"):
            message += " (before --best, which may have a METRIC)"
        self.exit(2, f"{self.prog}: error: {message}\n")


class _VersionAction(argparse.Action):
    """Option that prints the versions of jengine and of what it runs on, and exits."""

    def __init__(self, option_strings: Sequence[str], dest: str, **settings: Any) -> None:
        super().__init__(
            option_strings,
            dest,
            nargs=0,
            help="print versions and devices, for bug reports",
            **settings,
        )

    def __call__(self, parser: argparse.ArgumentParser, *arguments: Any) -> None:
        from jengine.cli.commands import describe_versions

        print(describe_versions())
        parser.exit()


class Commands:
    """The commands of `jengine`, to which extras add their own: see `add_commands` of an extra.

    `traceback`, `config` and `run` are parents for parsers of commands: with the option
    `--traceback`; with a config and `--config.PATH=VALUE` too; with a work dir and several
    processes too.
    """

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        self._groups = {"": parser.add_subparsers(dest="command", required=True, metavar="COMMAND")}
        self._parsers: dict[str, argparse.ArgumentParser] = {}
        self.traceback = argparse.ArgumentParser(add_help=False)
        self.traceback.add_argument(
            "--traceback", action="store_true", help="show the full traceback of an error"
        )
        self.config = argparse.ArgumentParser(add_help=False, parents=[self.traceback])
        self.config.add_argument("config", metavar="CONFIG", help="a Python file with get_config()")
        self.run = argparse.ArgumentParser(add_help=False, parents=[self.config])
        _add_run_options(self.run)

    def add(
        self,
        name: str,
        run: str,
        text: str,
        *parents: argparse.ArgumentParser,
        runs_code: bool = True,
    ) -> argparse.ArgumentParser:
        """Add a command and return its parser.

        Args:
          name: one word, or the command's group and a word: 'ckpt ls'.
          run: the function that runs it, as 'package.module:function'. It takes the parsed
            arguments and the overrides of the config, and may return an exit code.
          text: a line of help.
          *parents: parsers whose arguments the command has too.
          runs_code: whether the command runs code that a user wrote, whose errors are shown with
            their lines.
        """
        group, _, word = name.rpartition(" ")
        parser: argparse.ArgumentParser = self._groups[group].add_parser(
            word, parents=parents, help=text
        )
        parser.set_defaults(run=run, runs_code=runs_code, parser=parser)
        self._parsers[name] = parser
        return parser

    def add_group(self, name: str, text: str) -> None:
        """Add a command that has commands of its own."""
        parser = self._groups[""].add_parser(name, help=text)
        self._groups[name] = parser.add_subparsers(dest="action", required=True, metavar="ACTION")

    def __contains__(self, name: str) -> bool:
        return name in self._parsers

    def __getitem__(self, name: str) -> argparse.ArgumentParser:
        """Return the parser of a command, for further options."""
        return self._parsers[name]


def build_parser() -> argparse.ArgumentParser:
    """Build the parser for all commands; `run` in the parsed arguments names their function.

    >>> build_parser().parse_args(["test", "configs/digits_cnn.py", "epoch_1"]).run
    'jengine.cli.commands:test'
    """
    parser = _Parser(
        prog="jengine",
        description="Train JAX models from config files.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action=_VersionAction)
    # for commands without these options
    parser.set_defaults(
        work_dir=None, launcher="none", coordinator=None, num_processes=None, process_id=None
    )
    commands = Commands(parser)
    train = commands.add("train", "jengine.cli.train:run", "train a config's model", commands.run)
    resume = (
        "continue from the newest checkpoint of the work dir ('must': or fail; 'exact': the same "
        "config), or PATH"
    )
    train.add_argument("--resume", nargs="?", const=True, metavar="PATH", help=resume)
    test = commands.add("test", "jengine.cli.commands:test", "test a checkpoint", commands.run)
    add_checkpoint(test)
    commands.add(
        "config", "jengine.cli.commands:config", "print the resolved config", commands.config
    )
    commands.add_group("ckpt", "list, show, remove or export checkpoints")
    # By name: options of a command, 'ckpt export --jax-export', come after the command
    for module in dict.fromkeys(module for _, module in sorted(provided("commands").items())):
        importlib.import_module(module).add_commands(commands)
    return parser


def add_checkpoint(command: argparse.ArgumentParser) -> None:
    """Add the arguments that `choose_checkpoint` reads."""
    command.add_argument("checkpoint", metavar="CHECKPOINT", help=CHECKPOINT)
    command.add_argument("--best", nargs="?", const=True, metavar="METRIC", help=_BEST)


def _add_run_options(run: argparse.ArgumentParser) -> None:
    run.add_argument(
        "--work-dir",
        metavar="DIR",
        help="directory for checkpoints and logs (default: work_dirs/CONFIG)",
    )
    processes = run.add_argument_group("several processes")
    launchers = (
        "none, slurm, mpi, kubernetes, tpu or auto (default: that in whose environment the "
        "process runs)"
    )
    processes.add_argument("--launcher", metavar="NAME", help=launchers)
    processes.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    processes.add_argument("--num-processes", type=int, metavar="N", help="number of processes")
    processes.add_argument(
        "--process-id", type=int, metavar="I", help="index of this process, from 0"
    )
